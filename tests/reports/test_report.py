"""The HTML page of a run: what is in it, and that it opens anywhere."""

import html.parser
import json
import math
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from toys import batches, mlp_trainer

from jaxdp import Sharded
from jaxdp.callbacks import (
    CSVLogger,
    GradientMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from jaxdp.callbacks.stopwatch import PHASES
from jaxdp.reports.figures import Curve, _Scale, line_chart, number, split_box
from jaxdp.reports.layout import layout
from jaxdp.reports.page import (
    Run,
    comparison,
    differences,
    read_run,
    throughput_of,
    write_comparison,
    write_report,
)


class Split(Sharded):
    def param_spec(self, path, leaf):
        return P("data") if leaf.ndim == 2 and leaf.shape[0] % 8 == 0 else P()


class Page(html.parser.HTMLParser):
    """Curves by chart, the text, and whatever would be loaded from elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.curves, self.loaded, self.text, self.tags = {}, [], "", []
        self._open, self._charts = [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if "data-curves" in attrs:
            self._charts.append(json.loads(attrs["data-curves"]))
        if tag == "figcaption":
            self._open.append(tag)
        self.loaded += [attrs[k] for k in ("src", "href") if k in attrs]

    def handle_data(self, data):
        self.text += data + " "
        if self._open:
            self.curves[data] = dict(self._charts[-1])
            self._open.pop()


def test_the_page_has_the_curves_and_what_the_run_was_made_of(tmp_path):
    callbacks = [CSVLogger(tmp_path), ThroughputMonitor(), GradientMonitor()]
    trainer = mlp_trainer(*callbacks, strategy=Split())
    history = trainer.fit(batches(*[8] * 6), batches(8), max_epochs=3)
    path = trainer.report(tmp_path)
    assert path == str(tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    loss = page.curves["loss"]
    assert [x for x, _ in loss["steps"]] == list(range(1, 19))
    assert [y for _, y in loss["training"]] == history["loss"]
    assert loss["validation"] == [
        list(p) for p in zip([6, 12, 18], history["val_loss"], strict=True)
    ]
    assert {"accuracy", "examples/s", "share of the time"} <= set(page.curves)
    by_layer = next(v for k, v in page.curves.items() if k.startswith("grad_norm by"))
    assert list(by_layer) == ["layers[0]", "layers[1]", "layers[2]"]
    assert "scale_by_adam(b1=0.9" in page.text and jax.__version__ in page.text
    assert "layers[1].weight" in page.text and "P('data',)" in page.text
    assert "finished" in page.text
    assert "peak memory per device" in page.source  # the plan's page, in a frame
    assert page.loaded == [] and "http" not in page.source
    assert "@import" not in page.source and "url(" not in page.source


def test_terminal_page_and_comparison_count_throughput_in_one_way(tmp_path, capsys):
    # The saver waits for the disk after the others' turn, and yet is in the sums.
    monitor = ThroughputMonitor(peak_flops_per_device=1e9)
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3)
    trainer = mlp_trainer(CSVLogger(tmp_path), monitor, saver)
    trainer.log_every_n_steps = 4
    trainer.fit(batches(*[8] * 10, 5), batches(8), max_epochs=2)
    summary, run = monitor.summary, read_run(tmp_path)
    found = throughput_of(run)
    assert {*PHASES, "examples", "seconds", "examples_per_s", "mfu"} == set(found)
    assert found == pytest.approx({name: summary[name] for name in found}, rel=1e-4)
    assert found["examples"] == 170  # of steps that no row of steps has, too
    assert found["examples_per_s"] * found["seconds"] == pytest.approx(170)
    assert sum(found[phase] for phase in PHASES) == pytest.approx(1, rel=1e-4)

    said = capsys.readouterr().err
    page = Page(Path(trainer.report(tmp_path)))
    rows = {name: value for name, value in comparison([run])[1:]}
    rate = summary["examples_per_s"]
    assert f"170 examples in {summary['seconds']:.3g} s" in said
    assert f"{rate:.3g} examples/s" in said or f"{rate / 1e3:.3g} kexamples/s" in said
    assert f"checkpoints {summary['checkpoints']:.0%}" in said
    assert f"170 examples in {number(found['seconds'])} s" in page.text
    assert f"examples/s {number(found['examples_per_s'])}" in page.text
    assert rows["examples_per_s"] == number(found["examples_per_s"])
    assert f"checkpoints  {found['checkpoints']:.1%}" in page.text
    assert rows["time: checkpoints"] == f"{found['checkpoints']:.1%}"


def test_tables_without_seconds_have_no_throughput_of_the_run(tmp_path):
    table = "epoch,step,loss,throughput/examples_per_s\n0,1,0.5,7000\n0,2,0.4,6000\n"
    (tmp_path / "metrics.csv").write_text(table)
    run = read_run(tmp_path)
    assert throughput_of(run) == {}
    assert "examples/s" in Page(write_report(run, tmp_path / "a.html")).curves


def test_rows_that_are_torn_or_of_before_a_resume_are_left_out_of_the_sums(tmp_path):
    shares = ",".join(f"throughput/{phase}" for phase in PHASES)
    old, new = (
        "0.5" + ",0.1" * (len(PHASES) - 1),
        "0.75" + ",0.05" * (len(PHASES) - 1),
    )
    rows = [
        f"epoch,step,throughput/examples_per_s,{shares},throughput/examples,"
        "throughput/seconds",
        f"0,1,7000,{old},,",  # of a version that logged no seconds
        f"0,2,100,{new},200,2",
        "0,3,100,0.7",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    found = throughput_of(read_run(tmp_path))
    assert (found["examples"], found["seconds"]) == (200, 2)
    assert found[next(iter(PHASES))] == 0.75


def test_a_trainer_without_a_table_reports_its_epochs(tmp_path):
    trainer = mlp_trainer()
    history = trainer.fit(batches(8, 8), batches(8), max_epochs=2)
    trainer.report(tmp_path / "deep" / "page.html")
    page = Page(tmp_path / "deep" / "page.html")
    assert page.curves["loss"]["training"] == [
        [1, history["loss"][0]],
        [2, history["loss"][1]],
    ]
    assert "epoch" in page.text


def test_a_plan_is_shown_as_it_shows_itself(tmp_path):
    class Plan:
        def to_html(self, path):
            with open(path, "w") as file:
                file.write('<h1>64 devices & "more"</h1>')

    trainer = mlp_trainer()
    trainer.fit(batches(8))
    trainer.report(tmp_path / "a.html", plan=Plan())
    assert (
        'srcdoc="&lt;h1&gt;64 devices &amp; &quot;more'
        in (tmp_path / "a.html").read_text()
    )
    trainer.report(tmp_path / "b.html", plan="64 < 65")
    assert "<pre>64 &lt; 65</pre>" in (tmp_path / "b.html").read_text()


def browser():
    names = ("chromium", "google-chrome", "chromium-browser", "chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or pytest.skip("no Chromium here")


def test_the_page_opens_in_a_browser(tmp_path):
    command = browser()
    trainer = mlp_trainer(CSVLogger(tmp_path), ThroughputMonitor())
    trainer.fit(batches(*[8] * 6), batches(8), max_epochs=2)
    path = trainer.report(tmp_path)
    done = subprocess.run(
        [
            *(command, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
            f"file://{path}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'data-ready="yes"' in done.stdout  # the script ran to its end
    assert done.stdout.count("<polyline") == path_count(path)


def path_count(path):
    with open(path) as file:
        return file.read().count("<polyline")


def test_texts_cannot_break_the_page(tmp_path):
    name = "<script>alert('x')</script>\""
    columns = {f"epoch_{name}": [(1.0, 0.5)], f"val_{name}": [(1.0, 0.25)], name: []}
    run = Run(name, {"hyperparameters": {name: name}, "status": name}, columns)
    write_report(run, tmp_path / "a.html", plan=name)
    page = Page(tmp_path / "a.html")
    assert page.tags.count("script") == 1  # ours
    assert page.curves[name]["validation"] == [[1, 0.25]]
    write_comparison([run, run._replace(name="b")], tmp_path / "b.html")
    assert Page(tmp_path / "b.html").tags.count("script") == 1


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [2.0, 2.0],
        [0.0, 0.0],
        [math.nan, 1.0, math.inf],
        [-5.0, 1e-30, 3e8],
        [1e-8, 1.0, 1e8],
        [1.0, 150.0],
        [1e-320, 1.0],
    ],
)
def test_any_numbers_can_be_drawn(values):
    chart = line_chart("a", [Curve("a", list(enumerate(values)), "#000", "dots")], "x")
    assert "<svg" in chart
    assert "nan" not in chart.lower().replace("finance", "")
    assert "inf" not in chart.split("<svg")[1].split("</svg>")[0]


def test_nothing_to_draw_is_no_chart():
    assert line_chart("a", [Curve("a", [(1.0, math.nan)], "#000")], "x") == ""
    assert line_chart("a", [], "x") == ""


def test_long_curves_are_thinned_without_losing_their_means():
    values = np.random.default_rng(0).normal(size=10_000)
    chart = line_chart("a", [Curve("a", list(enumerate(values)), "#000")], "x")
    points = json.loads(html.unescape(chart.split('data-curves="')[1].split('"')[0]))
    (_, thinned) = points[0]
    assert len(thinned) <= 600
    assert np.mean([y for _, y in thinned]) == pytest.approx(values.mean(), abs=1e-3)


def test_ticks_are_round_and_inside():
    for low, high in [(0, 147), (0.1, 0.13), (-3, 5), (1e6, 7e6)]:
        ticks = _Scale(low, high, 0, 1).ticks()
        assert 3 <= len(ticks) <= 7
        assert all(low <= tick <= high for tick in ticks)
    assert _Scale(1e-4, 1.0, 0, 1, logarithmic=True).ticks() == pytest.approx(
        [1e-4, 1e-3, 1e-2, 0.1, 1]
    )
    assert [number(x) for x in (0.001, 12, 4869, 13130, 4.2e6, 1e-7, 0)] == (
        ["0.001", "12", "4869", "13.13k", "4.2M", "1e-07", "0"]
    )


def test_the_layout_is_that_of_the_arrays():
    trainer = mlp_trainer(strategy=Split())
    trainer.fit(batches(8, 8))
    rows = layout(trainer.state)
    device = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(trainer.state)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    assert sum(row["bytes_per_device"] for row in rows) == held
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    assert sum(row["bytes"] for row in rows) == whole
    (row,) = [r for r in rows if r["path"] == "layers[1].weight"]
    assert row["splits"] == [8, 1] and row["copies"] == 1
    (row,) = [r for r in rows if r["path"] == "layers[2].bias"]
    assert row["splits"] == [1] and row["copies"] == 8
    assert split_box([8, 1], 1, 64, 22).count("<rect") == 8
    assert split_box([], 8, 64, 22).count("<rect") == 1
    assert split_box([512], 1, 64, 22).count("<rect") == 16


def test_runs_are_compared(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        logger = CSVLogger(tmp_path / name, hyperparameters={"mine": name})
        trainer = mlp_trainer(logger, seed=seed)
        trainer.fit(batches(*[8] * 4), batches(8), max_epochs=1 + seed)
    runs = [read_run(tmp_path / "a"), read_run(str(tmp_path / "b" / "metrics.csv"))]
    rows = {row[0]: row[1:] for row in comparison(runs)}
    assert rows["steps"] == ["4", "8"] and rows["epochs"] == ["1", "2"]
    assert rows["status"] == ["finished"] * 2
    best = [run.best("val_loss")[0] for run in runs]
    marked = [text.endswith(" *") for text in rows["val_loss, best"]]
    assert marked == [value == min(best) for value in best]
    accuracy = [run.last("epoch_accuracy") for run in runs]
    marked = [text.endswith(" *") for text in rows["accuracy, last epoch"]]
    assert marked == [value == max(accuracy) for value in accuracy]
    differ = {row[0]: row[1:] for row in differences(runs)}
    assert differ["mine"] == ["a", "b"] and differ["seed"] == ["0", "1"]
    assert "model" not in differ
    write_comparison(runs, tmp_path / "c.html")
    curves = Page(tmp_path / "c.html").curves["loss"]
    assert [len(points) for points in curves.values()] == [1, 2]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics.csv there. A run is"):
        read_run(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileNotFoundError, match=r"There are .*sub/metrics.csv"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="no columns `epoch` and `step`"):
        read_run(tmp_path / "sub")


def test_a_table_that_is_being_written_can_be_read(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,step,loss\n0,1,0.5\n0,2,\n")
    run = read_run(tmp_path)
    assert run.columns["loss"] == [(1.0, 0.5)] and run.record == {}
    write_report(run, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("[" * 60_000, "nested more than 100 deep"),
        ("[]", "must be an object"),
        ('{"layout": [{"part": 1}]}', r"`record.layout\[0\]` has no path"),
        ('{"hyperparameters": "x"}', "`record.hyperparameters` is 'x'"),
        ('{"plan": {"memory": {}}}', "`record.plan` has no wire_bytes"),
        (None, "1,099,511,627,776 bytes"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path, record, told):
    (tmp_path / "metrics.csv").write_text("epoch,step,loss\n0,1,2.0\n")
    with (tmp_path / "metrics.json").open("w") as file:
        file.truncate(2**40) if record is None else file.write(record)
    with pytest.raises(ValueError, match=f"metrics.json` is not what.*{told}"):
        read_run(tmp_path)


def test_records_that_say_little_and_tables_of_a_terabyte(tmp_path):
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,step,loss\n0,1,2.0\n")
    record = {"hyperparameters": {"parameters": "many"}, "hardware": {"cpu": 1}}
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    assert write_report(read_run(tmp_path), tmp_path / "page.html").exists()
    with table.open("a") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="metrics.csv.*1,099,511,627,776 bytes"):
        read_run(tmp_path)
