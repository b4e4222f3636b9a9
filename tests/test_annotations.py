"""The jaxtyping annotations, held to by a run-time checker in eager mode.

The package only imports jaxtyping for type checkers: a run-time checker inside would break graphs
and mask_mods. Here, in a process of its own, it is switched on.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

CHECKED = """
import importlib, torch, jaxtyping, beartype, beartype.door, typing
import torch._dynamo, torch.nn.attention.flex_attention, torch.nn.attention.varlen
# Other packages' modules, which import in a circle if they are checked as well.
for name in ("triton.experimental.gluon.language", "transformers.trainer_callback"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
typing.TYPE_CHECKING = True
with jaxtyping.install_import_hook(
    ["nsa_flex.attention", "nsa_flex.compression", "nsa_flex.gates", "nsa_flex.rotary",
     "nsa_flex.module", "nsa_flex.selected"],
    "beartype.beartype",
):
    import nsa_flex
typing.TYPE_CHECKING = False
from nsa_flex import NSAAttention, NSAConfig, nsa_attention, selected_attention
config = NSAConfig(8, 4, 16, 4, window_size=20, compression="mlp")
q, k, v = (torch.randn(2, h, 50, d) for h, d in ((4, 8), (2, 8), (2, 6)))
ck, cv = (x.unfold(2, 8, 4).mean(-1) for x in (k, v))
gates = torch.rand(2, 4, 50, 3)
"""

GOOD = """
assert nsa_attention(q, k, v, ck, cv, gates, config=config).shape == (2, 4, 50, 6)
nsa_attention(q[:, :, 40:], k, v, ck, cv, gates[:, :, 40:], config=config)
nsa_attention(q, k, v, ck, cv, gates, config=config, query_offset=torch.zeros(2).long())
nsa_attention(q, k, v, ck, cv, gates, config=config, sliding_key=k, sliding_value=v)
blocks = torch.zeros(2, 2, 50, 3, dtype=torch.int32)
out, lse = selected_attention(q, k, v, blocks, config=config, return_lse=True)
assert out.shape == (2, 4, 50, 6) and lse.shape == (2, 4, 50)
for kind in ("mean", "weighted", "linear", "mlp"):
    layer = NSAAttention(32, 4, 2, config=NSAConfig(8, 4, 16, 4, compression=kind))
    assert layer(torch.randn(2, 50, 32)).shape == (2, 50, 32)
print("accepted")
"""

BAD = """
try:
    nsa_attention(q, k, v[:, :1], ck, cv, gates, config=config)
except ValueError:
    raise SystemExit("the function's own check came first: annotations are not checked")
except Exception as error:
    assert "jaxtyping" in type(error).__module__, error
    print("refused")
"""


def test_annotations_tell_the_truth() -> None:
    code = textwrap.dedent(CHECKED + GOOD + BAD)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["accepted", "refused"]
