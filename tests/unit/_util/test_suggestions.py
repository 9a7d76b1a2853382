from __future__ import annotations

import pytest

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.cli.flags import parser

NAMES = ["label_cols", "labels_col", "feature_cols"]


def test_the_nearest_names_are_suggested():
    assert did_you_mean("lable_cols", NAMES) == "Did you mean 'label_cols'?"
    assert did_you_mean("label_col", NAMES, most=2) == "Did you mean 'labels_col' or 'label_cols'?"
    assert did_you_mean("Label_Cols", NAMES, most=2) == "Did you mean 'label_cols'?"
    assert did_you_mean("s4", ["s3", "gs"], show="{}://".format, cutoff=0.5) == "Did you mean s3://?"
    assert did_you_mean("epochs", NAMES) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fusion-treshold-mb", "32"], "unknown flag --fusion-treshold-mb. Did you mean --fusion-threshold-mb?"),
        (["--ssh-prot=22"], "unknown flag --ssh-prot=22. Did you mean --ssh-port?"),
        (["--zzz"], "unknown flag --zzz."),
    ],
)
def test_the_error_for_a_misspelled_flag_of_sparkhvdrun_suggests_the_nearest_flag(words, message, capsys):
    with pytest.raises(SystemExit):
        parser().parse(["-np", "2", *words, "python", "train.py"])
    assert capsys.readouterr().err == f"sparkhvdrun: {message} See sparkhvdrun --help.\n"
