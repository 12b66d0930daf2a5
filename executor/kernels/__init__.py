"""Our own CPU kernels: their C++ sources, how they are built at first use, and how they are called."""
