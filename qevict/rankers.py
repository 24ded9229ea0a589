"""What ranks windows (App. J): one of four estimators, or the prompt scores of any registered method. Torch-free.

cumulative   S = S + u                      u: attention received since the last event (Eq. 20 and 21)
decay        S = λ S + u                    (Eq. 22)
p_norm       S = (Σ u^p)^(1/p)              (Eq. 23)
key_norm     S = -mean |k|                  (Eq. 24): no attention needed
a method     first its utilities of prompt tokens, then as cumulative
"""

from __future__ import annotations

import difflib

from kvcache.method import Method, method_class, method_names

OWN = ("cumulative", "decay", "p_norm", "key_norm")


def ranking_method(name: str) -> Method | None:
    """The registered method of this name, with its default settings; None for one of the four.

    Raises ValueError, naming the nearest rankers, for a name that ranks nothing.
    """
    if name in OWN:
        return None
    if _scores(name):
        return method_class(name)()
    what = "is a method that does not score prompt tokens" if name in method_names() else "is unknown"
    known = [*OWN, *(other for other in method_names() if other not in OWN and _scores(other))]
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise ValueError(f"ranker {name!r} {what}; {hint}")


def _scores(name: str) -> bool:
    return name in method_names() and callable(getattr(method_class(name), "scores", None))
