"""SGLang: plugin entry point, flag, pools, batches.

``plugin.py`` is called in every process of the server; ``flag.py`` gives the server its flag;
``attach.py`` puts the canary around ``ModelRunner.forward``; ``pools.py`` says what memory is
guarded; ``batch.py`` translates a ``ForwardBatch``; ``versions.py`` holds what differs between
SGLang versions.
"""
