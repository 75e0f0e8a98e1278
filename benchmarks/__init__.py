"""The speed of jaxdp beside a loop written by hand and beside other libraries.

python -m benchmarks            every work, every peer that is installed
python -m benchmarks.quick      has jaxdp become slower? Under two minutes
python -m benchmarks.memory     does a long run keep its memory flat?
python -m benchmarks.start      how long is it from import to the first loss?
python -m benchmarks.growth     how do costs grow with leaves, callbacks, devices, rows?
python -m benchmarks.gpu        large and tiny models on one GPU

`docs/speed.md` says what is measured and how.
"""
