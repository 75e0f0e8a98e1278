"""Each refusal of the extras is an error that says what to do."""

import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attending import Model, layer_and_inputs, tokens
from published import GPT2_NAMES, LLAMA_NAMES, Decoder, gpt2
from toys import (
    Deep,
    DeepBlock,
    Mlp,
    batches,
    each_refused,
    linear_on_one_device,
    make_small,
)

import jaxdp
from jaxdp import (
    Bitwise,
    LocalSGD,
    Pmap,
    SequenceParallel,
    Sharded,
    SingleDevice,
    Stack,
    decay_mask,
    fuse_attention,
    steps_of,
)
from jaxdp.callbacks import (
    MLFlowLogger,
    OptunaPruning,
    TensorBoardLogger,
    WandbLogger,
)
from jaxdp.extras.finders import lr_find
from jaxdp.extras.plan import hlo
from jaxdp.losses import token_cross_entropy

KEY = jax.random.key(0)


EVERYONE = """HloModule jit_step, num_partitions=8

ENTRY %main (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  ROOT %all = f32[] all-reduce(%p), replica_groups=everyone
}
"""


def find_rate(**options):
    trainer = linear_on_one_device()
    return lr_find(trainer, batches(8), optimizer=optax.adam, **options)


def attend(change=(), **options):
    layer, (query, key_, value) = layer_and_inputs()
    arguments = {"query": query, "key_": key_, "value": value, **dict(change)}
    return fuse_attention(layer, **options)(**arguments)


def adapt(model=None, **arguments):
    model = Deep(4) if model is None else model
    return jaxdp.lora(model, **{"patterns": "last", "rank": 2, "key": KEY} | arguments)


def recompute(*remat):
    return make_small(Model(), strategy=Bitwise(SingleDevice()), remat=[*remat])


def plan(strategy=None, **options):
    trainer = make_small(strategy=strategy or Sharded(8), loss="cross_entropy")
    return trainer.plan(batches(64), **options)


def trial(*directions):
    optuna = pytest.importorskip("optuna")
    return optuna.create_study(directions=directions or ["minimize"]).ask()


def blocks(*others):
    return Stack([DeepBlock(8, KEY), *others])


def losses(**changes):
    arguments = {"head": eqx.nn.Linear(8, 50, key=KEY), "hidden": jnp.ones((4, 24, 8))}
    arguments["targets"] = jnp.ones((4, 24), int)
    return token_cross_entropy(**arguments | changes)


def load(names, file="none.safetensors", **options):
    return jaxdp.load_weights(file, Decoder(False), names, **options)


def load_gpt2(ignore):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(gpt2(), "gpt2.safetensors")
    return jaxdp.load_weights("gpt2.safetensors", Decoder(), GPT2_NAMES, ignore=ignore)


def save(names=(), file="model.safetensors", **options):
    pytest.importorskip("safetensors")
    return jaxdp.save_weights(Decoder(), file, GPT2_NAMES | dict(names), **options)


def load_torn():
    with open("torn.eqx", "wb") as file:
        file.write(b"\x93NUMPY")
    return jaxdp.load_model("torn.eqx", like=Mlp(KEY))


def split(rows, targets):
    strategy = SequenceParallel({"data": 1, "seq": 8})
    return make_small(strategy=strategy, loss="mse").fit([(rows, targets)])


class OwnAttention(eqx.nn.MultiheadAttention):
    pass


NO_ATTENTION = "has no eqx.nn.MultiheadAttention"
DIFFERS = "`blocks`: number 1 differs from number"
WRONG = ValueError, TypeError

REFUSED = {
    "Bitwise": [
        (lambda: recompute("blocks.stacked.attention"), ValueError,
         r"can't keep the bits.*Stack.*remat=True"),
    ],
    "compare": [
        (lambda: make_small().compare(batches(16), Pmap), TypeError,
         "`strategy` must be an instance of a jaxdp.DataParallel"),
        (lambda: make_small().compare(batches(16), steps=0), ValueError,
         "`steps` must be 1 or more; got 0"),
        (lambda: make_small().compare([], Pmap()), ValueError, "`loader`"),
        (lambda: make_small(loss="cross_entropy").compare(batches(16), LocalSGD(2)),
         ValueError, r"`compare`: LocalSGD\(every=2.* another algorithm"),
    ],
    "decay_mask, steps_of": [
        (lambda: decay_mask(3)({"weight": jnp.zeros((2, 2))}), TypeError,
         "`exclude` is 3, of type int"),
        (lambda: steps_of(iter(batches(8)), 3), TypeError,
         "iterator without a length.*max_steps"),
    ],
    "lr_find": [
        (lambda: lr_find("x", batches(8), optimizer=optax.adam), TypeError,
         "`trainer` must be a jaxdp.Trainer; got 'x'"),
        (lambda: find_rate(min_lr=1.0, max_lr=0.1), ValueError,
         "the first less than the second"),
        (lambda: find_rate(num_training=1), ValueError, "must be 2 or more"),
        (lambda: find_rate(mode="cosine"), ValueError,
         "must be one of 'exponential', 'linear'"),
    ],
    "fuse_attention": [
        (lambda: fuse_attention(Model(), causal="decoder.*"), ValueError,
         r"'decoder.\*' matches no"),
        (lambda: fuse_attention(Model(), causal=[]), TypeError, "`causal` must be"),
        (lambda: fuse_attention(Model(), block=0), ValueError,
         "`block` must be 1 or more"),
        (lambda: fuse_attention(Model(), implementation="flash"), ValueError,
         "`implementation` must be one of"),
        (lambda: fuse_attention(Mlp(KEY)), ValueError, NO_ATTENTION),
        (lambda: fuse_attention(OwnAttention(4, 16, key=KEY)), ValueError,
         "subclasses of it are left alone"),
    ],
    "fused attention": [
        (lambda: attend({"query": jnp.ones((2, 13, 16))}), ValueError,
         "call the layer by jax.vmap"),
        (lambda: attend(causal=True), ValueError, "13 queries and 17 keys"),
        (lambda: attend({"segment_ids": jnp.zeros(13, int)}), ValueError,
         "13 queries and 17 keys"),
        (lambda: attend({"mask": jnp.ones((17, 13), bool)}), ValueError,
         r"\(13, 17\)"),
        (lambda: attend({"mask": jnp.zeros((13, 17))}), ValueError,
         "`mask` must be of booleans"),
        (lambda: attend({"query": tokens(17), "segment_ids": jnp.zeros(17)}),
         ValueError, "`segment_ids` must be integers.*got float32"),
        (lambda: attend({"mask": jnp.ones((13, 17), bool)}, implementation="cudnn"),
         ValueError, "computes no dropout, no `mask`"),
    ],
    "LocalSGD": [
        (lambda: make_small(strategy=LocalSGD(2), after_update=lambda model: model),
         ValueError, "`after_update`: LocalSGD trains a replica"),
    ],
    "lora": [
        (lambda: adapt(rank=0), ValueError, "`rank` must be 1 or more"),
        (lambda: adapt(alpha=0), ValueError, "`alpha` must be more than 0"),
        (lambda: adapt(adapt()), ValueError, "last has an adapter already"),
        (lambda: adapt([eqx.nn.Linear("scalar", 3, key=KEY)], patterns="*"),
         ValueError, "scalar features"),
        (lambda: jaxdp.merge_lora(Mlp(KEY)), ValueError, "has no adapters"),
    ],
    "files of weights": [
        (lambda: jaxdp.save_model("model.pkl", Mlp(KEY)), ValueError,
         "must end with '.safetensors' or '.eqx'"),
        (lambda: jaxdp.load_model("none", like=Mlp(KEY)), FileNotFoundError,
         "there is no checkpoint at"),
        (load_torn, ValueError, "is damaged or belongs to another model"),
    ],
    "OptunaPruning": [
        (lambda: OptunaPruning(None), TypeError, "`trial` must be an optuna.Trial"),
        (lambda: OptunaPruning([trial()]), TypeError, "`trial` must be an optuna.Tri"),
        (lambda: OptunaPruning(trial("minimize", "maximize")), ValueError,
         "several objectives"),
    ],
    "plan": [
        (lambda: plan(devices=0), ValueError, "`devices` must be 1 or more; got 0"),
        (lambda: plan(devices="8"), TypeError, "`devices` must be an int"),
        (lambda: plan(devices=4096), ValueError, "must be 1 to 2048"),
        (lambda: plan(topology="h100"), ValueError, "`topology`='h100' is not known"),
        (lambda: plan(topology="v5p-12"), ValueError, "has 6 chips"),
        (lambda: plan(topology="h100x8", devices=8), ValueError, "were both given"),
        (lambda: plan(hardware="h1000"), ValueError, "`hardware` must be one of 'a1"),
        (lambda: plan(SingleDevice(), devices=4), ValueError,
         "SingleDevice uses 1 device, not 4"),
        (lambda: plan(hosts=3), ValueError, "`hosts`=3 does not divide the 8 devices"),
        (lambda: plan(topology="h100x16", hosts=2), ValueError,
         "a topology has its own hosts"),
        (lambda: plan(hosts=0), ValueError, "`hosts` must be 1 or more"),
        (lambda: plan().largest_batch(None), ValueError, "`memory` is needed"),
        (lambda: plan().largest_batch("16GB"), TypeError,
         "`memory` must be a number, in bytes"),
        (lambda: plan().largest_batch(0), ValueError, "`memory` must be more than 0"),
        (lambda: hlo.read(EVERYONE), ValueError, "unknown spelling"),
        (lambda: hlo.read("module @jit_f {}"), ValueError,
         "does not start with HloModule"),
        (lambda: hlo.count_ring_bytes("broadcast", 2, 1, 1), ValueError,
         "`kind` must be one of"),
    ],
    "Stack": [
        (lambda: Stack([]), ValueError, "`blocks` must have at least one block"),
        (lambda: blocks(DeepBlock(4, KEY)), ValueError, DIFFERS),
        (lambda: blocks(DeepBlock(8, KEY, 0.5)), ValueError, DIFFERS),
        (lambda: blocks(eqx.nn.Identity()), ValueError, DIFFERS),
        (lambda: Stack([{"a": jnp.ones(2)}, {"a": jnp.ones(3)}]), ValueError, DIFFERS),
    ],
    "SequenceParallel": [
        (lambda: SequenceParallel({"data": 8}), ValueError,
         "`mesh_shape` must be two sizes by name"),
        (lambda: SequenceParallel({"data": 2, "seq": 2, "model": 2}), ValueError,
         "must be two sizes"),
        (lambda: SequenceParallel({"data": 1, "seq": 4}), ValueError,
         "for 1 x 4 = 4 devices, and there"),
        (lambda: SequenceParallel({"data": 0, "seq": 8}), ValueError,
         "mesh_shape: data"),
        (lambda: split(np.zeros((2, 17), np.int32), np.zeros((2, 17))), ValueError,
         r"'seq': 8}\) splits axis 1.*multiple of 8; where a loss shifts.*x, y = tok"),
        (lambda: split(np.zeros(4, np.float32), np.zeros(4)), ValueError,
         r"'seq': 8}\) splits axis 1.*none has one; they are"),
    ],
    "token_cross_entropy": [
        (lambda: losses(hidden=jnp.ones((4, 8))), ValueError,
         r"\(batch, tokens, features\)"),
        (lambda: losses(targets=jnp.ones(24, int)), ValueError,
         r"\(tokens, features\)"),
        (lambda: losses(targets=jnp.ones((4, 23), int)), ValueError, r"\(4, 23\)"),
        (lambda: losses(targets=jnp.ones((4, 24))), TypeError, "float32"),
        (lambda: losses(weights=jnp.ones(4)), ValueError, "one for each token"),
        (lambda: losses(chunk=0), ValueError, "`chunk` must be at least 1"),
        (lambda: losses(label_smoothing=2), ValueError, "from 0 to 1"),
    ],
    "load_weights": [
        (lambda: load({"embed.weight": 3}), WRONG,
         r"`names`\['embed.weight'\] must be the name of a tensor"),
        (lambda: load({"embed.weight": ("w", "P")}), WRONG,
         r"has 'P', which is none of \('T', \*axes\)"),
        (lambda: load({"embed.weight": ("w", ("split", 3, 3))}), WRONG,
         r"has \('split', 3, 3\), which is none of"),
        (lambda: load({"blocks.*.nrm": "w"}), WRONG,
         r"nrm'\] matches no leaf of the model; there are embed.weight, blocks.\*.nor"),
        (lambda: load({"embed.*": "w.*", "*.weight": "*"}), WRONG,
         r"'embed.\*' and '\*.weight' both match embed.weight"),
        (lambda: load({"embed.*": "h.*.*"}), WRONG, r"has 1 stars and 'h.\*.\*' 2"),
        (lambda: load(LLAMA_NAMES, "."), FileNotFoundError, "0 files"),
        (lambda: load(LLAMA_NAMES), FileNotFoundError, "there is no file"),
        (lambda: load(LLAMA_NAMES, "gs://bucket/a.safetensors"), ValueError,
         "gs://bucket"),
        (lambda: load_gpt2(["h.*.attn.bias", "*.inv_freq"]), ValueError,
         r"`ignore`: '\*.inv_freq' matches no tensor"),
        (lambda: load_gpt2(()), ValueError, r"no leaf takes.*\n    h\.\*\.attn\.bias"),
    ],
    "save_weights": [
        (lambda: save(file="model.bin"), ValueError, "must end with"),
        (lambda: save({"blocks.*.attn.key.weight": None}), ValueError,
         "each of 3 parts once"),
        (lambda: save({"head.weight": "wte.weight"}), ValueError,
         "embed.weight, head.weight, but"),
        (lambda: jaxdp.save_weights(Decoder(), "a.safetensors", {"head.*": None}),
         ValueError, "names no tensor for embed.weight"),
        *((lambda dtype=dtype: save(dtype=dtype), ValueError,
           "`dtype` must be a floating-point one") for dtype in ("int8", "no/file", 2)),
    ],
}  # fmt: skip


@each_refused(REFUSED)
def test_what_can_not_be_is_refused(provoke, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        provoke()
    assert re.search(words, str(caught.value), re.DOTALL), caught.value
    assert not (tmp_path / "model.safetensors").exists()


def log(logger):
    linear_on_one_device(logger(dirpath=".")).fit(batches(8))


MISSING = {
    "wandb": lambda: log(WandbLogger),
    "mlflow": lambda: log(MLFlowLogger),
    "tensorboard.summary.writer.event_file_writer": lambda: log(TensorBoardLogger),
    "optuna": lambda: OptunaPruning(object()),
    "safetensors.numpy": lambda: save(),
}


@pytest.mark.parametrize("module", MISSING)
@pytest.mark.filterwarnings("ignore")  # of what wandb and mlflow depend on
def test_a_missing_package_is_named(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    remedy = rf"`pip install {package}` \(.* extra `(loggers|{package})`\)"
    with pytest.raises(ImportError, match=remedy):
        MISSING[module]()
