"""One HTML page about a run, without anything from the network.

command    `rhymemeg report RUN`, options and errors
page       sections of the page from what `rhymemeg.observe.read_run` found
engines    charts of engines over windows: heat map, timeline, Gantt
charts     SVG by hand: lines, stacks, heat maps
"""
