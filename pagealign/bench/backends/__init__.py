"""The backends, the most telling first."""

from pagealign.bench.backends.flashinfer import FlashInfer
from pagealign.bench.backends.interface import Backend
from pagealign.bench.backends.ipex import Ipex
from pagealign.bench.backends.plain import Plain
from pagealign.bench.backends.sgl_kernel import SglKernel


def all_backends() -> tuple[Backend, ...]:
    return (SglKernel(), Ipex(), FlashInfer(), Plain())
