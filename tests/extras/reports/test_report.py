"""The HTML page of a run: what is in it, and that it opens anywhere."""

import html.parser
import json
import os
import re
from html import escape
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P
from toys import batches, mlp_trainer

from jaxdp import History, Sharded
from jaxdp.basics.stopwatch import PHASES
from jaxdp.basics.units import format_seconds
from jaxdp.callbacks import (
    CSVLogger,
    GradientMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from jaxdp.extras.reports.runs import (
    Run,
    compare_runs,
    format_number,
    format_percent,
    make_metric_charts,
    make_other_charts,
    make_run,
    make_throughput_charts,
    read_run,
    summarize_throughput,
    write_report,
)


class Split(Sharded):
    def param_spec(self, path, leaf):
        return P("data") if leaf.ndim == 2 and leaf.shape[0] % 8 == 0 else P()


class Page(html.parser.HTMLParser):
    """The text of a page, its elements, and whatever would be loaded from elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.text, self.tags = [], "", []
        self.source = Path(path).read_text()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attrs = dict(attrs)
        links = [attrs[k] for k in ("src", "href", "xlink:href") if k in attrs]
        links += re.findall(r"url\(([^)]*)\)", " ".join(map(str, attrs.values())))
        self.loaded += [link for link in links if not link.startswith("#")]

    def handle_data(self, data):
        self.text += data + " "


def curves(charts):
    """The points of every curve that has some, by chart and label."""
    return {
        name: {curve.label: list(curve.points) for curve in found if curve.points}
        for name, found in charts.items()
    }


def test_the_page_has_the_curves_and_what_the_run_was_made_of(tmp_path):
    callbacks = [CSVLogger(tmp_path), ThroughputMonitor(), GradientMonitor()]
    trainer = mlp_trainer(*callbacks, strategy=Split())
    history = trainer.fit(batches(*[8] * 6), batches(8), max_epochs=3)
    path = trainer.report(tmp_path)
    assert path == str(tmp_path / "report.html")

    run = read_run(tmp_path)
    steps, training, validation = curves(make_metric_charts(run))["loss"].values()
    assert [x for x, _ in steps] == list(range(1, 19))
    assert [y for _, y in training] == history["loss"]
    assert validation == list(zip([6, 12, 18], history["val_loss"], strict=True))
    assert {"examples/s", "share of the time"} <= set(make_throughput_charts(run))
    by_layer = curves(make_other_charts(run))["grad_norm by layer"]
    assert list(by_layer) == ["layers[0]", "layers[1]", "layers[2]"]

    page = Page(path)
    for name in ("loss", "accuracy", "steps, smoothed", "grad norm by layer"):
        assert f" {name} " in page.text
    assert "scale_by_adam(b1=0.9" in page.text and jax.__version__ in page.text
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d UTC \| finished ", page.text)
    assert "Memory per device" in page.source
    assert page.loaded == [] and "@import" not in page.source
    assert page.tags.count("svg") == 3 and "script" not in page.tags


def test_page_and_comparison_count_throughput_in_one_way(tmp_path, capsys):
    monitor = ThroughputMonitor(1e3, peak_flops_per_device=1e9)
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3)
    trainer = mlp_trainer(CSVLogger(tmp_path), saver, monitor)
    trainer.log_every_n_steps = 4
    trainer.fit(batches(*[8] * 10, 5), batches(8), max_epochs=2)
    summary, run = monitor.summary, read_run(tmp_path)
    said = capsys.readouterr().err
    assert f"170 examples in {format_seconds(summary['seconds'])}" in said
    assert f"{format_number(summary['examples_per_s'])} examples/s" in said

    # The rows end with the last logged step, the 20th of 22.
    found = summarize_throughput(run)
    assert {*PHASES, "examples", "seconds", "examples_per_s", "mfu"} == set(found)
    assert found["examples"] == 157 and found["seconds"] < summary["seconds"]
    assert found["examples_per_s"] * found["seconds"] == pytest.approx(157)
    assert sum(found[phase] for phase in PHASES) == pytest.approx(1, rel=1e-4)
    page = Page(trainer.report(tmp_path))
    rows = {name: value for name, value in compare_runs([run])[1:]}
    assert f"157 examples in {format_seconds(found['seconds'])}:" in page.text
    assert f"{format_number(found['examples_per_s'])} per second" in page.text
    assert rows["examples_per_s"] == format_number(found["examples_per_s"])
    assert f" mfu {format_percent(found['mfu'])} " in page.text
    assert rows["time: checkpoints"] == f"{found['checkpoints']:.1%}"


def test_a_trainer_without_a_table_reports_its_epochs_and_a_plan(tmp_path):
    trainer, data = mlp_trainer(), batches(8, 8)
    history = trainer.fit(data, batches(8), max_epochs=2)
    plan = trainer.plan(data)
    trainer.report(tmp_path / "deep" / "page.html", plan=plan)
    page = Page(tmp_path / "deep" / "page.html")
    assert " epoch " in page.text and f" {history['loss'][1]:.4g} " in page.text
    assert f"<pre>{escape(str(plan))}</pre>" in page.source


def test_texts_cannot_break_the_page(tmp_path):
    name = "<script>alert('x')</script>\"--><b>$title"
    columns = {f"epoch_{name}": [(1.0, 0.5)], f"val_{name}": [(1.0, 0.25)], name: []}
    made = {"hyperparameters": {name: name}, "status": name}
    run = Run(name, made, columns)
    page = Page(write_report(run, tmp_path / "a.html"))
    assert not {"script", "b"} & set(page.tags)
    assert page.text.count("alert('x')") >= 3


def test_numbers_and_times_are_written_in_short():
    values = (0.001, 12, 4869, 13130, 4.2e6, 1e-7, 0, float("nan"))
    texts = ["0.001", "12", "4.869 k", "13.13 k", "4.2 M", "1e-07", "0", "-"]
    assert [format_number(value) for value in values] == texts
    shares = {0.4321: "43.2%", 0.000259: "0.0259%", float("nan"): "-"}
    assert [format_percent(share) for share in shares] == [*shares.values()]
    told = {0.0123: "12.3 ms", 3.2: "3.2 s", 59.7: "1 min 0 s", 125: "2 min 5 s"}
    assert {each: format_seconds(each) for each in told} == told
    assert format_seconds(2 * 3600 + 125) == "2 h 2 min"


def test_runs_are_named_by_what_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["runs/a/", str(tmp_path / "runs" / "deep" / "b"), "runs/c"]
    heads = compare_runs([Run(name, {}, {}) for name in names])[0]
    assert heads == ["", "a", os.path.join("deep", "b"), "c"]
    twice = compare_runs([Run("runs/a", {}, {}), Run("runs/a", {}, {})])[0]
    assert twice == ["", "runs/a", "runs/a"]


SPEEDS = "epoch,step,loss,throughput/examples_per_s\n0,1,0.5,7000\n0,2,0.5,6000\n"
SHORT = "epoch,step,loss\n0,1,0.5\n0,2,\n"
LITTLE = {"hyperparameters": {"parameters": "many"}, "hardware": {"cpu": 1}}


def write_run(folder, table, record):
    for name, text in (("metrics.csv", table), ("metrics.json", record)):
        if text is not None:
            (folder / name).write_text(text)


@pytest.mark.parametrize(("table", "record"), [(SPEEDS, {}), (SHORT, LITTLE)])
def test_runs_that_lack_something_are_shown(tmp_path, table, record):
    write_run(tmp_path, table, json.dumps(record) if record else None)
    run = read_run(tmp_path)
    assert run.columns["loss"][0] == (1.0, 0.5) and run.record == record
    assert summarize_throughput(run) == {}
    speeds = ["examples/s"] if table == SPEEDS else []
    assert list(make_throughput_charts(run)) == speeds
    page = Page(write_report(run, tmp_path / "page.html"))
    assert (" examples/s " in page.text) == bool(speeds)


@pytest.mark.parametrize("table, record, error, message", [
    (None, None, FileNotFoundError, "is not a run: a run is a folder"),
    ("a,b\n1,2\n", None, ValueError, "no columns `epoch` and `step`"),
    (SHORT, "[]", ValueError, "metrics.json` is not what.*must be an object"),
    (SHORT, '{"hyperparameters": "x"}', ValueError, "hyperparameters` is 'x"),
    (SHORT, "[", ValueError, "metrics.json` is not what.*Expecting value"),
])  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path, table, record, error, message):
    write_run(tmp_path, table, record)
    with pytest.raises(error, match=message):
        read_run(tmp_path)


def test_of_equal_epochs_the_older_is_the_best():
    history = History()
    for epoch in (0, 1):
        history.append(epoch, {"loss": 1.0})
    run = make_run("a", history, {})
    assert run.best("epoch_loss") == (1.0, 0.0)
    for name, best in (("acc", 2.0), ("loss", 1.0)):
        curve = [(1.0, 0.2), (2.0, 0.7), (3.0, 0.7), (4.0, 0.2)]
        assert run._replace(columns={name: curve}).best(name)[1] == best
