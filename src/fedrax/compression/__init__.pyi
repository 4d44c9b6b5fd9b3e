from fedrax.compression.efsign import EFSign as EFSign
from fedrax.compression.error_feedback import ErrorFeedback as ErrorFeedback
from fedrax.compression.quantize import Quantized as Quantized
from fedrax.compression.quantize import QuantizedBroadcast as QuantizedBroadcast
from fedrax.compression.randomk import RandomK as RandomK
from fedrax.compression.topk import TopK as TopK
