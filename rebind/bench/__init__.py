"""What `rebind bench` measures: our scan beside other implementations, on this machine.

- `scan`: the benchmark itself; `contenders`: the implementations that take part, and their inputs.
- `measure`: times, memory, and what this machine is and can do.
- `report`: tables for a terminal, and the figure.
"""
