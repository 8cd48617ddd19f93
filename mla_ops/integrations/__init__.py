"""For serving engines: an interface shaped like FlashMLA's, and vLLM backends. Nothing here is imported unasked."""
