"""What the benchmarks of a step share: inputs that any program can make, and how a call is timed."""

import statistics
import time

import torch


def wave(*shape, phase):
    """Numbers of about unit size that any program can make."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (1.4 * torch.sin(n * 0.7390851 + phase)).float().view(shape)


def timed(steps, run):
    """The last value, medians of wall and CPU time of `steps` runs after one to warm up, and the peak of memory so far."""
    wall, cpu = [], []
    for _ in range(steps + 1):
        t, p = time.perf_counter(), time.process_time()
        value = run()
        wall.append(time.perf_counter() - t)
        cpu.append(time.process_time() - p)
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    return f"{value:.6f}  wall {statistics.median(wall[1:]):.3f} s  cpu {statistics.median(cpu[1:]):.3f} s  peak {int(peak) // 1024} MiB"
