"""`restore_best` in a job whose best weights are on disk alone."""

from together import fit, tell, trainer, weights_of

from jaxdp.callbacks import Callback, EarlyStopping, ModelCheckpoint

SCORES = [3.0, 1.0, 2.0, 4.0]


class OfEpoch(Callback):
    def on_validation_end(self, trainer, metrics):
        metrics["val_loss"] = SCORES[trainer.current_epoch]


def ends(into, strategy="FSDP"):
    """The weights of a run that is not resumed, and of one that is, at their ends."""
    weights = []
    for name, fits in {"whole": [9], "resumed": [3, 9]}.items():
        for max_epochs in fits:
            stopping = EarlyStopping(patience=2, restore_best=True)
            saver = ModelCheckpoint(f"{into}/{name}", "val_loss", save_last=True)
            run = trainer(strategy, [stopping, saver, OfEpoch()])
            fit(run, max_epochs, ckpt_path="auto")
        assert (run.global_step, stopping.stopped_epoch) == (16, 3)
        weights.append(weights_of(run))
    tell(weights=weights)
