"""A run that is done hands its report to whoever learns from it, and says what he says; others hand over nothing."""

import json

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.host import versions
from trainer.memory.device.calibration import calibration_file, corrections, learn
from trainer.protocol import events
from trainer.training.run.start import start

SHORT = ("recipe.steps=2", "report.previews.prompts=[]", "report.validation.every=2")


def test_a_finished_run_is_learned_from_and_trouble_with_that_is_told(tmp_path):
    told, reports = [], []

    def troubled(report):
        reports.append(report)
        return learn(report) or "Kept, with trouble."

    job = write_job(tmp_path, tiny_base("sd15", tmp_path, depth=1), photographs(tmp_path / "pictures", 3))
    assert start(job, SHORT, told.append, learn=troubled) == 0
    (report,) = reports
    assert (report.gpu, report.seconds > 0) == ("cpu", True)
    assert [event.sentence for event in told if isinstance(event, events.Notice) and event.code == "calibration"] == [
        "Kept, with trouble."
    ]
    (kept,) = json.loads(calibration_file().read_text(encoding="utf-8"))["runs"]
    assert kept["images_per_second"] == report.images_per_second
    assert corrections("cpu", report.system, versions()).runs == 1
