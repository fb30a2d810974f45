"""Triton device code and its launchers, nothing else.

The letters, everywhere: ``*B`` leading batch dims (flattened to one axis ``Z`` here), ``M`` rows (tokens), ``K`` inner
dim of the first product, ``N`` hidden dim (``d_ff``), ``O`` output columns. Weights have ``nn.Linear``'s layout
``[out, in]``; a transposed weight is a swap of strides, not a copy.

The rule of this layer: a launcher receives checked tensors, a tile configuration and names; it allocates its outputs,
launches, and returns them. It decides nothing (that is ``fusedlayers.planning``) and knows nothing of autograd
(that is ``fusedlayers.functional``). Without Triton the modules still import, but their device code is inert.
"""

if __name__ == "kernels":
    # In a clone this folder hides Hugging Face's package of the same name, which transformers imports: hand over to it.
    import sys
    from importlib.machinery import PathFinder
    from importlib.metadata import distributions
    from importlib.util import module_from_spec

    for _installed in distributions(name="kernels"):
        _found = PathFinder.find_spec("kernels", [str(_installed.locate_file(""))])
        if _found is not None and _found.loader is not None:
            sys.modules["kernels"] = module_from_spec(_found)
            _found.loader.exec_module(sys.modules["kernels"])
            break
