from . import meta
