"""Is this slower than it was? `rhymemeg perf run | record | compare`.

suite       what is measured: probes, each a piece of work that is timed again and again
worker      one process that measures some of them, in turns
measure     rounds of such processes, of one source tree or of two in turns
result      what was measured, with machine and versions; files of it, and a history of them
runs        the same from a run directory of a real run
statistics  how sure a difference is: location, bootstrap, bands (pure)
compare     which phase moved, and by how much
command     the command line
"""
