"""`lmbench numerics`: operators fail where their formulas say, and the sums agree with the published ones."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lmbench.numerics import FORMS, overflows_from

#: The smallest number that is rounded to infinity, and the largest that is rounded to zero.
OVERFLOW = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 * (1 - 2**-9), torch.float32: 2.0**128 * (1 - 2**-25)}
UNDERFLOW = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
#: The x at which a form fails, by its first step that fails: a square, a sum of squares in float32, exp(x) or exp(-x).
FORMULAS = {
    **dict.fromkeys(
        [("LayerNorm", "written out"), ("RMSNorm", "written out")],
        lambda dtype, width: min(OVERFLOW[dtype], OVERFLOW[torch.float32] / width) ** 0.5,
    ),
    ("softmax", "exp / sum"): lambda dtype, width: math.log(OVERFLOW[dtype]),
    ("cross entropy", "-log(softmax)"): lambda dtype, width: -math.log(UNDERFLOW[dtype]),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", OVERFLOW, ids=str)
@pytest.mark.parametrize("width", [64, 1024, 4098])
def test_operators_fail_where_their_formulas_say(device, dtype, width):
    for form in FORMS:
        x = overflows_from(form, dtype, width, torch.device(device))
        if (form.operator, form.form) in FORMULAS:
            # Sums and exponentials have rounding errors.
            assert x == pytest.approx(FORMULAS[form.operator, form.form](dtype, width), rel=2**-6), form
        elif dtype is torch.float16 or not form.operator.endswith("Norm"):
            assert x is None, form


def test_json_has_both_tables_and_the_sums_agree_with_the_published_ones(printed):
    tables = json.loads(printed("numerics", "--json"))["tables"]
    for row in tables["sums"]:
        assert all(abs(float(text) - row["loop"]) < 5e-5 for text in row["published"].split(", "))
    norm = next(row for row in tables["overflows"] if (row["operator"], row["form"]) == ("LayerNorm", "written out"))
    assert (norm["float16"], len(tables["overflows"])) == (256, len(FORMS))
