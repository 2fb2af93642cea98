"""A model type for lm-evaluation-harness: a Hugging Face model whose attention is replaced.

    python -m subquad.integrations.lm_eval run --model subquad --model_args pretrained=PATH,method=multipole --tasks ...

The module is the `lm_eval` command with one more model type. Everything else is that of `--model hf`.
"""

from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("subquad.integrations.lm_eval needs lm-evaluation-harness: pip install lm_eval") from error

from subquad.attention import MethodLike
from subquad.integrations.transformers import replace_attention


@register_model("subquad")
class SubquadLM(HFLM):  # type: ignore[misc]  # lm_eval has no types of its own
    """A Hugging Face model with another attention method.

    Args:
        *arguments: As for `--model hf`.
        method: The method for `replace_attention`, or its name.
        layers: Numbers of the layers to change, separated by "+" on the command line; all by default.
        **options: As for `--model hf`.

    Attributes:
        report: What `replace_attention` returned.
    """

    def __init__(
        self, *arguments: Any, method: MethodLike = "exact", layers: str | int | list[int] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        numbers = None if layers is None else layers if isinstance(layers, list) else map(int, str(layers).split("+"))
        self.report = replace_attention(self.model, method, layers=numbers)


if __name__ == "__main__":
    cli_evaluate()
