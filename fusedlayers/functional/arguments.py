"""Checks of arguments, before anything is allocated: each error names the argument, what it was, what was expected."""

import functools
from itertools import pairwise

import torch
from torch import Tensor


@functools.cache
def _autocast_kind(device: torch.device) -> str | None:
    # A device takes its time to say its type, which never changes; some types (meta) know no autocast.
    return device.type if torch.amp.is_autocast_available(device.type) else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives to products on ``device``, or None where it leaves them alone."""
    kind = _autocast_kind(device)
    if kind is None or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def said(name: str, tensor: Tensor) -> str:
    """How an error speaks of a tensor argument."""
    return f"{name} of shape {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}"


def check_tensors(tensors: dict[str, Tensor | None]) -> None:
    """Floating tensors on one device, of one dtype unless autocast decides it; the first of them sets both.

    Raises:
        TypeError: not a tensor, not a real floating dtype, or dtypes that differ outside autocast.
        ValueError: different devices.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor is None or first is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{said(name, tensor)}: expected a real floating-point dtype")
        if tensor.device != first.device:
            raise ValueError(f"{said(name, tensor)}: expected the device of {first_name}, {first.device}")
        mixed = tensor.dtype != first.dtype
        if mixed and not (autocast_dtype(first.device) and torch.float64 not in (tensor.dtype, first.dtype)):
            raise TypeError(f"{said(name, tensor)}: expected the dtype of {first_name}, {first.dtype}")


def check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...], letters: str, because: str) -> None:
    """``tensor`` has the expected shape (None passes)."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"{said(name, tensor)}: expected {letters} = {list(expected)} {because}")


def check_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    dropout_p: float,
    recompute: bool | int | str,
    residual: Tensor | None,
) -> None:
    """All arguments of ``functional.ffn`` but the activation."""
    if x is None or w_up is None or w_down is None:
        missing = next(name for name, t in (("x", x), ("w_up", w_up), ("w_down", w_down)) if t is None)
        raise TypeError(f"{missing} must be a torch.Tensor, got None")
    check_tensors(
        {
            "x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down,
            "w_gate": w_gate, "b_gate": b_gate, "residual": residual,
        }
    )  # fmt: skip
    if x.dim() < 1:
        raise ValueError(f"{said('x', x)}: expected [*B, M, K], at least one dimension")
    if w_up.dim() != 2:
        raise ValueError(f"{said('w_up', w_up)}: expected [N, K], nn.Linear's layout")
    hidden, width = w_up.shape
    if width != x.shape[-1]:
        hint = " (it looks transposed)" if hidden == x.shape[-1] else ""
        raise ValueError(
            f"{said('w_up', w_up)}: expected [N, K] with K = {x.shape[-1]}, the last dimension of x "
            f"{list(x.shape)}{hint}"
        )
    if w_down.dim() != 2 or w_down.shape[1] != hidden:
        hint = " (it looks transposed)" if w_down.dim() == 2 and w_down.shape[0] == hidden else ""
        raise ValueError(
            f"{said('w_down', w_down)}: expected [O, N] with N = {hidden}, the rows of w_up {list(w_up.shape)}{hint}"
        )
    out = w_down.shape[0]
    check_shape("b_up", b_up, (hidden,), "[N]", "as w_up has N rows")
    check_shape("b_down", b_down, (out,), "[O]", "as w_down has O rows")
    check_shape("w_gate", w_gate, (hidden, width), "[N, K]", "as w_up")
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{said('b_gate', b_gate)}: expected None, because w_gate is None")
    check_shape("b_gate", b_gate, (hidden,), "[N]", "as w_gate has N rows")
    check_shape("residual", residual, (*x.shape[:-1], out), "[*B, M, O]", "as the result")
    check_dropout("dropout_p", dropout_p)
    check_recompute(recompute)


def check_dropout(name: str, probability: float) -> None:
    """A probability in [0, 1): at 1 nothing would be kept and the scale 1 / (1 - p) is infinite."""
    if isinstance(probability, bool) or not isinstance(probability, (int, float)):
        raise TypeError(f"{name} must be a float in [0, 1), got {probability!r}")
    if not 0 <= probability < 1:
        raise ValueError(f"{name} must be in [0, 1), got {probability!r}")


def check_dropout_seed(x: Tensor, seed: Tensor | None) -> None:
    """None, or one int64 on the device of x."""
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        raise TypeError(f"dropout_seed must be a torch.Tensor or None, got {type(seed).__name__}")
    if seed.dtype != torch.int64:
        raise TypeError(f"{said('dropout_seed', seed)}: expected dtype torch.int64")
    if seed.shape != (1,):
        raise ValueError(f"{said('dropout_seed', seed)}: expected [1]")
    if isinstance(x, Tensor) and seed.device != x.device:
        raise ValueError(f"{said('dropout_seed', seed)}: expected the device of x, {x.device}")


def check_recompute(recompute: bool | int | str) -> None:
    """``"auto"``, ``True``, ``False``, or a number of bytes."""
    if isinstance(recompute, int):
        # 0 and 1 equal False and True, and 0 would ask for the opposite.
        if isinstance(recompute, bool) or recompute > 1:
            return
    elif recompute == "auto":
        return
    raise ValueError(f'recompute must be "auto", True, False or an int of bytes above 1, got {recompute!r}')


def check_gemm_gemm(a: Tensor, b: Tensor, c: Tensor) -> None:
    """All arguments of ``functional.gemm_gemm`` but the activation."""
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    check_tensors({"a": a, "b": b, "c": c})
    for name, tensor, letters in (("a", a, "[*B, M, K]"), ("b", b, "[*B, K, N]"), ("c", c, "[*B, N, O]")):
        if tensor.dim() < 2:
            raise ValueError(f"{said(name, tensor)}: expected {letters}, at least two dimensions")
    if b.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"{said('b', b)}: expected [*B, K, N] with K = {a.shape[-1]}, the last dimension of a {list(a.shape)}"
        )
    if c.shape[-2] != b.shape[-1]:
        raise ValueError(
            f"{said('c', c)}: expected [*B, N, O] with N = {b.shape[-1]}, the last dimension of b {list(b.shape)}"
        )
    batches = [tuple(tensor.shape[:-2]) for tensor in (a, b, c)]
    try:
        torch.broadcast_shapes(*batches)
    except RuntimeError as error:
        raise ValueError(
            f"{said('a', a)}, {said('b', b)}, {said('c', c)}: expected leading dimensions *B that broadcast, "
            f"got {', '.join(str(list(batch)) for batch in batches)}"
        ) from error


def check_maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    cu_seqlens_queries: Tensor | None,
    cu_seqlens_documents: Tensor | None,
) -> None:
    """All arguments of ``functional.maxsim`` but the values of the offsets (:func:`check_offsets`)."""
    for name, tensor in (("queries", queries), ("documents", documents)):
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    check_tensors({"queries": queries, "documents": documents})
    sides = (
        ("queries", queries, "[Q, Lq, d]", "query_mask", query_mask, "[Q, Lq]", cu_seqlens_queries),
        ("documents", documents, "[D, Ld, d]", "document_mask", document_mask, "[D, Ld]", cu_seqlens_documents),
    )
    for name, tensor, letters, mask_name, mask, mask_letters, offsets in sides:
        offsets_name = f"cu_seqlens_{name}"
        for extra_name, extra in ((mask_name, mask), (offsets_name, offsets)):
            if extra is not None and not isinstance(extra, Tensor):
                raise TypeError(f"{extra_name} must be a torch.Tensor or None, got {type(extra).__name__}")
            if extra is not None and extra.device != queries.device:
                raise ValueError(f"{said(extra_name, extra)}: expected the device of queries, {queries.device}")
        if offsets is not None:
            if mask is not None:
                raise ValueError(f"{said(mask_name, mask)}: expected None, because {offsets_name} packs {name}")
            if offsets.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{said(offsets_name, offsets)}: expected dtype torch.int32 or torch.int64")
            if offsets.dim() != 1 or offsets.shape[0] < 1:
                raise ValueError(f"{said(offsets_name, offsets)}: expected one dimension, the offsets 0, …, total")
        expected, why = (3, "") if offsets is None else (2, f", packed, because of {offsets_name}")
        if tensor.dim() != expected:
            layout = letters if offsets is None else "[total, d]"
            raise ValueError(f"{said(name, tensor)}: expected {layout}{why}")
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(f"{said(mask_name, mask)}: expected dtype torch.bool, True where a token takes part")
            check_shape(mask_name, mask, tuple(tensor.shape[:2]), mask_letters, f"as {name} {list(tensor.shape)}")
    if documents.shape[-1] != queries.shape[-1]:
        raise ValueError(
            f"{said('documents', documents)}: expected d = {queries.shape[-1]}, "
            f"the last dimension of queries {list(queries.shape)}"
        )


def check_offsets(name: str, offsets: Tensor | None, tokens: Tensor) -> None:
    """The values of ``cu_seqlens``: 0 first, never decreasing, the rows of ``tokens`` last. Waits for a GPU's copy."""
    if offsets is None:
        return
    values, total = offsets.tolist(), tokens.shape[0]
    if values[0] != 0:
        raise ValueError(f"{said(name, offsets)}: expected 0 first, got {values[0]}")
    fall = next((place for place, (one, two) in enumerate(pairwise(values)) if two < one), None)
    if fall is not None:
        found = f"{values[fall]}, {values[fall + 1]} at {fall} and {fall + 1}"
        raise ValueError(f"{said(name, offsets)}: expected values that never decrease, got {found}")
    if values[-1] != total:
        raise ValueError(f"{said(name, offsets)}: expected {total} last, the number of packed tokens, got {values[-1]}")


def check_weight_gradient(dy: Tensor, x: Tensor, bias: bool) -> None:
    """All arguments of ``functional.weight_gradient``."""
    for name, tensor in (("dy", dy), ("x", x)):
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    check_tensors({"dy": dy, "x": x})
    check_bias(bias)
    for name, tensor, letters in (("dy", dy, "[*B, M, O]"), ("x", x, "[*B, M, K]")):
        if tensor.dim() < 1:
            raise ValueError(f"{said(name, tensor)}: expected {letters}, at least one dimension")
    if x.shape[:-1] != dy.shape[:-1]:
        raise ValueError(
            f"{said('x', x)}: expected [*B, M, K] with *B, M = {list(dy.shape[:-1])}, as dy {list(dy.shape)}"
        )


def check_bias(bias: bool) -> None:
    """Whether the sum over the rows is asked for: ``True`` or ``False``, not a tensor."""
    if not isinstance(bias, bool):
        raise TypeError(f"bias must be True or False, got {type(bias).__name__}")


def check_hidden_gradient(dy: Tensor, w_down: Tensor, z: Tensor, z_gate: Tensor | None, bias: bool) -> None:
    """All arguments of ``functional.hidden_gradient`` but the activation."""
    for name, tensor in (("dy", dy), ("w_down", w_down), ("z", z)):
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    check_tensors({"dy": dy, "w_down": w_down, "z": z, "z_gate": z_gate})
    check_bias(bias)
    if dy.dim() < 1:
        raise ValueError(f"{said('dy', dy)}: expected [*B, M, O], at least one dimension")
    if w_down.dim() != 2 or w_down.shape[0] != dy.shape[-1]:
        hint = " (it looks transposed)" if w_down.dim() == 2 and w_down.shape[1] == dy.shape[-1] else ""
        raise ValueError(
            f"{said('w_down', w_down)}: expected [O, N] with O = {dy.shape[-1]}, the last dimension of dy "
            f"{list(dy.shape)}{hint}"
        )
    shape = (*dy.shape[:-1], w_down.shape[1])
    for name, pre_activation in (("z", z), ("z_gate", z_gate)):
        because = f"as dy {list(dy.shape)} and w_down {list(w_down.shape)} set it"
        check_shape(name, pre_activation, shape, "[*B, M, N]", because)
