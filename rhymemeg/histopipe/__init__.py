"""HistoPipe: rollouts scheduled by the lengths of last epoch's responses.

    predict     lengths of last epoch -> predicted lengths; feedback from what came out
    cost        seconds of an engine step; profile files
    plan        plain data: what a plan is made from, and what it is
    policies/   random, paper, complement (default), pull: pure functions PlanRequest -> Plan
    planner     `plan`: checks the request, chooses the policy
    explain     a plan as text: who gets what and why
    window      what engines decide between two of their steps: start, close, carry, steal, migrate
    record      windows.jsonl: what happened in each window, and the metrics made from it
    figures     Gantt chart of a window, bars of a comparison
    simulator   event-driven engines under the same planner and the same window rules
    workloads   response lengths for the simulator
    simulate    the simulator's command line

Nothing here imports torch, vLLM or Megatron. Plans depend on nothing but their inputs (no clocks, hashes or set order),
so every rank computes the same plan and only counts travel.
"""
