"""The words of other libraries: the tables say what to write instead, which exists."""

import inspect
import pkgutil
import re

import pytest
from toys import make_small

import jaxdp
from jaxdp import Callback
from jaxdp.basics import arguments
from jaxdp.basics.other_libraries import INSTEAD

METHODS = {n for n, m in vars(Callback).items() if inspect.isfunction(m)}
ELSEWHERE = INSTEAD["Callback"]
OTHERS = """
setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end
on_train_start on_train_end on_validation_start on_validation_end on_test_start
on_test_end on_predict_start on_predict_end on_train_epoch_start on_train_epoch_end
on_validation_epoch_start on_validation_epoch_end on_test_epoch_start on_test_epoch_end
on_predict_epoch_start on_predict_epoch_end on_train_batch_start on_train_batch_end
on_validation_batch_start on_validation_batch_end on_test_batch_start on_test_batch_end
on_predict_batch_start on_predict_batch_end on_exception state_dict load_state_dict
on_save_checkpoint on_load_checkpoint on_before_backward on_after_backward
on_before_optimizer_step on_before_zero_grad
on_batch_begin on_batch_end on_epoch_begin on_epoch_end on_train_batch_begin
on_test_batch_begin on_predict_batch_begin on_train_begin on_test_begin on_predict_begin
""".split()  # of Lightning and Keras


@pytest.mark.parametrize("name", sorted({*OTHERS, *ELSEWHERE} - METHODS))
def test_each_hook_of_other_libraries_is_called_or_refused(name):
    ours = rf"`{ELSEWHERE[name]}\(self"
    if name.startswith("on_"):
        refused = pytest.raises(
            TypeError, match=rf"`Mine.{name}` is a hook of .*{ours}"
        )
    else:  # it may be a method of the user's
        refused = pytest.warns(UserWarning, match=rf"`Mine.{name}` is no hook.*{ours}")
    with refused:
        callback = type("Mine", (Callback,), {name: lambda self, *_: None})()
        make_small(callbacks=[callback])


def test_what_the_table_of_arguments_names_exists():
    answers = " ".join(INSTEAD["argument"].values())
    for name in re.findall(r"jaxdp\.([\w.]+)", answers):
        pkgutil.resolve_name(f"jaxdp.{name}")


def test_words_of_other_libraries_lead_to_arguments_that_exist():
    for function, words in INSTEAD.items():
        ours = {*arguments._ANNOTATIONS.get(function, {})}
        assert words.keys() & ours <= {"ckpt_path"}, function  # which has a note
        for answer in {*words.values()} if ours else ():
            for name in re.findall("it is called `(.+?)`", answer):
                assert name in ours, (function, answer)
    for name in ("Trainer", "fit"):
        assert not INSTEAD["argument"].keys() & {*arguments._ANNOTATIONS[name]}
    for module in ("callbacks", "strategies", "losses", "distributed"):
        names = dir(getattr(jaxdp, module))
        assert not INSTEAD[f"jaxdp.{module}"].keys() & {*names}
