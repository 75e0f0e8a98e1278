"""Tasks for processes of a test, with loaders and weights of other libraries."""

import pathlib
import warnings

import equinox as eqx
import jax
import numpy as np
from together import At, Deep, Mlp, rows, tell, trainer, weights_of

from jaxdp import load_weights, lora


def huggingface(local, folder):
    """Batches of an iterable dataset, through torch's loader."""
    import datasets
    import torch
    from datasets.distributed import split_dataset_by_node

    x, y = rows(96)
    whole = datasets.Dataset.from_dict({"x": x, "y": y}).shuffle(seed=0)
    dataset = whole.with_format("numpy").to_iterable_dataset(num_shards=4)
    if local:
        dataset = split_dataset_by_node(
            dataset, jax.process_index(), jax.process_count()
        )

    def pairs(items):
        return tuple(np.stack([item[name] for item in items]) for name in "xy")

    return torch.utils.data.DataLoader(dataset, 8, collate_fn=pairs)


def grains(local, folder):
    import grain

    x, y = rows(96)
    dataset = grain.MapDataset.source([(x[i], y[i]) for i in range(96)])
    dataset = dataset.shuffle(seed=1)
    if local:
        dataset = dataset[jax.process_index() :: jax.process_count()]
    return dataset.to_iter_dataset().batch(8)


def webdatasets(local, folder):
    import webdataset

    x, y = rows(96)
    index = jax.process_index()
    files = [f"{folder}/{index}-{part}.tar" for part in range(4)]
    if not pathlib.Path(files[0]).exists():
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for part, file in enumerate(files):
            with webdataset.TarWriter(file) as shard:
                for i in range(part, 96, 4):
                    item = {"x.npy": x[i], "y.cls": int(y[i])}
                    shard.write({"__key__": f"{i:04}", **item})
    if local:
        files = files[index :: jax.process_count()]
    dataset = webdataset.WebDataset(files, shardshuffle=4, seed=0)
    dataset = dataset.shuffle(32, seed=0).decode().to_tuple("x.npy", "y.cls")
    return dataset.batched(8)


class Draws:
    """A sampler of torch with a generator of its own."""

    def __init__(self, count):
        import torch

        self.torch, self.count = torch, count
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return self.count

    def __iter__(self):
        drawn = self.torch.randint(self.count, (self.count,), generator=self.generator)
        return iter(drawn.tolist())


def samplers(local, folder):
    from torch.utils.data import DataLoader

    x, y = rows(96)
    own = slice(jax.process_index() if local else 0, None, 2 if local else 1)
    pairs = list(zip(x[own], y[own], strict=True))
    return DataLoader(pairs, 8, sampler=Draws(len(pairs)))


LOADERS = {
    "huggingface": huggingface,
    "grain": grains,
    "webdataset": webdatasets,
    "a sampler": samplers,
}


def resume_all(into):
    """Each kind of loader, of all rows and of a process's own."""
    for kind in LOADERS:
        for local in (False, True):
            resumes(kind, local, f"{into}/{kind}-{local}")


def resumes(kind, local, into):
    """Reports if a run that was stopped inside an epoch ends like one that was not."""

    def run(epochs, *callbacks, ckpt_path=None):
        options = {"data": "local" if local else "global"}
        made = trainer("Sharded", callbacks, Mlp(jax.random.key(0)), **options)
        loader = LOADERS[kind](local, f"{into}/files")
        made.fit(loader, max_epochs=epochs, ckpt_path=ckpt_path)
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What other libraries warn of is not what is shown here.
        warnings.filterwarnings("ignore", module="torch|datasets|webdataset|grain")
        whole = run(3)
        per_epoch = whole.global_step // 3
        stop = per_epoch + 2
        stops = At(stop, lambda trainer: setattr(trainer, "should_stop", True))
        path = run(3, stops).save(f"{into}/saved")
        again = run(3, ckpt_path=path)
    tell(
        kind=kind,
        local=local,
        steps=whole.global_step,
        saved=stop,
        ended=again.global_step,
        same=weights_of(again) == weights_of(whole),
    )


NAMES = {"first.*": "in.*", "last.*": "out.*", "blocks.*.linear.weight": "h.*.w"}
NAMES["blocks.*.linear.bias"] = "h.*.b"


def pretrained(path, into):
    """Adapters on weights from a file, split over all processes; saved and resumed."""
    names = NAMES | {"**.down": None, "**.up": None}

    def made():
        shapes = eqx.filter_eval_shape(Deep, 4)
        model = lora(shapes, "blocks.**", 2, key=jax.random.key(1))
        run = trainer("FSDP", model=model)
        load_weights(path, run, names)
        return run

    data = [rows(16)] * 4
    whole = made()
    whole.fit(data, max_epochs=2)
    half = made()
    half.fit(data, max_epochs=1)
    saved = half.save(f"{into}/saved")
    again = made()
    again.fit(data, max_epochs=2, ckpt_path=saved)
    tell(same=weights_of(again) == weights_of(whole), weights=weights_of(whole))
