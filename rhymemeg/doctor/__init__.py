"""Is this machine, or every rank of an allocation, fit for a run? `rhymemeg doctor`, see `command`.

    finding       what a check says, and how bad it is
    packages      versions and builds against the project's pins                  facts -> findings
    gpu           GPUs through NVML: ECC, clocks, links, topology                 facts -> findings
    machine       cores, memory, limits, shared memory, disk, network             facts -> findings
    agreement     facts of all ranks against each other                           facts -> findings
    collective    latency and bandwidth of all-reduces, clocks of the hosts       measures, under torchrun
    command       the command line, the table, the exit status

Each check reads *facts* (plain data about this process's machine) and judges them in a pure function, so that what a bad
machine would look like can be tested without one.
"""
