"""The public names of fewbit: what an editor and a type checker see of the lazy face in __init__.py."""

from .fewbit_gen import solve as solve
from .runtime import allocation as allocation
from .runtime import layers as layers
from .runtime import models as models
from .runtime import quantizers as quantizers
from .runtime.activations import functional as functional
from .runtime.activations.catch import few_bit as few_bit
from .runtime.activations.following import adaptation_state as adaptation_state
from .runtime.activations.following import load_adaptation_state as load_adaptation_state
from .runtime.activations.gated_modules import GEGLU as GEGLU
from .runtime.activations.gated_modules import GLU as GLU
from .runtime.activations.gated_modules import ReGLU as ReGLU
from .runtime.activations.gated_modules import SwiGLU as SwiGLU
from .runtime.activations.modules import *  # noqa: F403 (of each activation one)
from .runtime.allocation import MixedPrecision as MixedPrecision
from .runtime.calibrate import calibrate as calibrate
from .runtime.compile.backend import inductor_options as inductor_options
from .runtime.compile.report import compile_report as compile_report
from .runtime.convert.actnn import ActNN as ActNN
from .runtime.convert.api import convert as convert
from .runtime.convert.api import revert as revert
from .runtime.convert.attention import Attention as Attention
from .runtime.convert.blpa import BLPA as BLPA
from .runtime.convert.chunked_loss import ChunkedLoss as ChunkedLoss
from .runtime.convert.gated_mlps import GatedMLPs as GatedMLPs
from .runtime.convert.method import Activations as Activations
from .runtime.convert.normalizations import Normalizations as Normalizations
from .runtime.convert.vquant import VQuant as VQuant
from .runtime.inference import vquant as vquant
from .runtime.layers import nn as nn
from .runtime.layers.preact import PreActConv1d as PreActConv1d
from .runtime.layers.preact import PreActConv2d as PreActConv2d
from .runtime.layers.preact import PreActConv3d as PreActConv3d
from .runtime.layers.preact import PreActLinear as PreActLinear
from .runtime.plan import memory as memory
from .runtime.plan.document import Plan as Plan
from .runtime.plan.fits import fits as fits
from .runtime.plan.guard import guard as guard
from .runtime.plan.planner import fit as fit
from .runtime.plan.planner import plan as plan
from .runtime.saved.checkpoint import checkpoint as checkpoint
from .runtime.saved.hooks import compress_saved_tensors as compress_saved_tensors
from .tables import FewbitError as FewbitError
from .tables import Table as Table
from .tables import load_table as load_table

__version__: str
