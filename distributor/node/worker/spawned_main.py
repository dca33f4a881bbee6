"""What a process that ``multiprocessing`` starts for a rank runs in place of the main module."""

from distributor.node.worker.main_module import load_main_module

if __name__ == "__mp_main__":
    load_main_module(globals())
