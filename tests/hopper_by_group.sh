H=/tmp/fr5/s2/mla_ops/kernels/hopper; T=/tmp/fr5/s2/tests
rm -rf b; mkdir b; cp $H/*.cuh $T/hopper_*.h sim.cpp b/
/work/main/.venv/bin/python - <<'P'
import re
I=re.compile(r'\basm(?: volatile)?\((?:[^;"]|"(?:[^"\\]|\\.)*")*\);')
for n in ("ptx.cuh","memory.cuh","arithmetic.cuh","topk_ptx.cuh","wide_ptx.cuh"):
    p="b/"+n; s=open(p).read(); open(p,"w").write(I.sub(";",s))
p="b/by_group.cuh"; s=open(p).read()
a=s.index("// Four e4m3 in a word"); b=s.index("// Of a turn: values are made")
open(p,"w").write(s[:a]+s[b:])
open("b/wgmma.cuh","w").write("#pragma once\n")
P
cp $T/hopper_counters.h b/counters.cuh
g++ -std=c++17 -O1 -w -pthread b/sim.cpp -o sim 2>&1 | grep error | head -20
