"""Where models are served: an interface shaped like FlashMLA's, and vLLM backends. Nothing here is imported unasked."""
