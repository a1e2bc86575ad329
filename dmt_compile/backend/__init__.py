"""``torch.compile(model, backend="dmt")``: the graphs that Dynamo makes, with their lookups served by the owners of the tables.

Found by torch through its entry point; see :func:`dmt_compile.backend.compiler.dmt`.
"""

from .compiler import dmt
from .explain import Explanation, explain
from .state import clip_grad_norm_, full_state_dict, load_full_state_dict

__all__ = ["Explanation", "clip_grad_norm_", "dmt", "explain", "full_state_dict", "load_full_state_dict"]
