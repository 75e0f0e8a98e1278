"""States in a checkpoint, and the callbacks that they are for."""

from toys import On, make_small

from jaxdp.callbacks import EarlyStopping, ModelCheckpoint
from jaxdp.callbacks.state_matching import match_states


def test_callbacks_are_matched_in_order_and_those_of_version_0_2_by_their_monitor(
    tmp_path,
):
    saver = ModelCheckpoint(tmp_path, "val_loss")
    others = EarlyStopping("val_area"), EarlyStopping("val_loss")
    trainer = make_small(callbacks=[On(), On(), *others, saver])
    names = "EarlyStopping EarlyStopping:1 ModelCheckpoint On On:1 On:2".split()
    identities = ["val_loss", "val_other", str(tmp_path), "", "", ""]
    meta = {
        "callbacks": dict(zip(names, range(6), strict=True)),
        "identities": dict(zip(names, identities, strict=True)),
    }
    matched = {"EarlyStopping:1": 0, "ModelCheckpoint": 2, "On": 3, "On:1": 4}
    assert match_states(trainer, meta) == matched
