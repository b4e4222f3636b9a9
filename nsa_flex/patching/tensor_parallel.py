"""`tensor_parallel`: each rank has some heads of every layer of a patched model."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.patching.layer import NSALayer, layer_of
from nsa_flex.patching.sites import Site, patched_sites
from nsa_flex.patching.wrapped import check_unwrapped

ModelT = TypeVar("ModelT", bound=nn.Module)


def tensor_parallel(model: ModelT, mesh: DeviceMesh) -> ModelT:
    """Split the heads of a patched model over the ranks of `mesh`, in place.

    A model that is whole is sharded by its own `tp_plan` (transformers), NSA layers included. Of
    one that a plan sharded since `patch` (torch's `parallelize_module`) the NSA layers follow.
    Every rank gives the same inputs, and finds the loss and gradients of one process; parameters
    are DTensors, whose `full_tensor()` is whole. `fully_shard` over another dimension of the mesh
    comes after this call. A checkpoint of a patched model that is loaded with a `tp_plan` needs no
    call.

    Args:
        model: a patched transformers model.
        mesh: of one dimension, `mesh["tp"]` of a larger one.

    Returns:
        `model`.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
        ValueError: the mesh has several dimensions or does not divide the KV heads; the model is
            not patched, is split already, is wrapped, or has no plan. It is then as it was.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; expected the one that splits "
            "heads, mesh[name]"
        )
    check_unwrapped(model, "tensor_parallel")
    sites = list(patched_sites(model))
    _check(model, sites, mesh)
    from nsa_flex.patching import hf_tensor_parallel
    from nsa_flex.patching.split_heads import split_heads

    meshes = [hf_tensor_parallel.mesh_of(site.name, site.module, site.decoder) for site in sites]
    if not any(meshes):
        hf_tensor_parallel.apply_plan(model, mesh)
        return model
    for site, found in zip(sites, meshes, strict=True):
        if found not in (None, mesh):
            raise ValueError(f"{site.name} is split over {found}, and mesh is {mesh}")
    for site, found in zip(sites, meshes, strict=True):
        if found is not None:
            split_heads(_layer(site), mesh)
    return model


def _check(model: nn.Module, sites: list[Site], mesh: DeviceMesh) -> None:
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no patched layers: call nsa_flex.patch(model) first"
        )
    from nsa_flex.patching.split_heads import check_heads_divide

    for site in sites:
        layer = _layer(site)
        if site.decoder is None:
            raise ValueError(
                f"{site.name} is run by an adapter, and which of its projections split heads "
                "cannot be told: tensor parallelism is for transformers' decoders"
            )
        if layer.compress_key.is_split:
            raise ValueError(f"the heads of {site.name} are split already")
        check_heads_divide(site.name, layer.shape, mesh.size(), "tensor parallelism")


def mesh_of_site(site: Site) -> Any:
    """Over which mesh the heads of a module that is to be patched are split; None if whole.

    Raises:
        ValueError: its parameters are sharded otherwise, or the ranks do not divide the KV heads.
    """
    if site.decoder is None or "torch.distributed.tensor" not in sys.modules:
        return None
    from nsa_flex.patching import hf_tensor_parallel
    from nsa_flex.patching.split_heads import check_heads_divide

    mesh = hf_tensor_parallel.mesh_of(site.name, site.module, site.decoder)
    if mesh is not None:
        check_heads_divide(site.name, site.shape(), mesh.size(), "tensor parallelism")
    return mesh


def _layer(site: Site) -> NSALayer:
    layer = layer_of(site.module)
    assert layer is not None
    return layer
