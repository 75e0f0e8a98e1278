"""Small or large values are best: `mode` decides, or the name of the metric."""

import pytest

from jaxdp.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from jaxdp.losses import METRICS

MIN = """loss val_loss val_loss[0] val_mse val_top_5_error val_cross_entropy
val_clean_loss[3] accuracy_loss val_f1_loss dice_loss mae val_mape rmse perplexity nll
kl""".split()
MAX = """acc accuracy val_accuracy val_accuracy[1] val_top_5 val_top_5_accuracy f1
val_f1_score val_macro_F1 AUC val_auc val_auroc val_precision recall val_Recall mean_iou
dice val_r2 val_map ssim""".split()


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint, ReduceLROnPlateau])
def test_the_name_of_the_monitor_gives_the_mode(kind, caplog):
    for monitor in (*MIN, *MAX):
        mode, other = ("min", "max") if monitor in MIN else ("max", "min")
        assert kind(monitor=monitor).mode == mode
        assert kind(monitor=monitor, mode=mode).mode == mode
        assert not caplog.text
        assert kind(monitor=monitor, mode=other).mode == other
        contradicts = monitor in ("loss", "val_loss", "accuracy", "val_accuracy")
        assert ("the worst value counts as the best" in caplog.text) is contradicts
        caplog.clear()
    for _ in range(2):
        assert kind(monitor=f"val_of_{kind.__name__}").mode == "min"
    assert caplog.text.count("does not tell which values are better") == 1
    caplog.clear()
    for mode in ("min", "max"):
        assert kind(monitor="val_area", mode=mode).mode == mode
    assert not caplog.text
    with pytest.raises(ValueError, match="`mode`"):
        kind(monitor="loss", mode="least")


def test_all_metrics_by_name_have_the_mode_of_their_name(caplog):
    modes = {name: EarlyStopping(f"val_{name}").mode for name in METRICS}
    missing = [text for text in caplog.messages if "does not tell which" in text]
    assert not missing, f"add to _IS_AN_ERROR in basics/columns.py: {missing}"
    largest = {name for name, mode in modes.items() if mode == "max"}
    assert largest == {"accuracy", "binary_accuracy", "top_5_accuracy"}
