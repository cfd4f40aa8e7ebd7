#!/bin/bash
# Start to first token by phase, base and new, with an empty and a filled Triton cache. Run at the repository root.
# BASE: sources of the base (default /tmp/mainsrc). MODELS, TREES, CACHES narrow the run. About 130 s in all.
[ -d /tmp/site ] || . .gpu-pack/site.sh
BASE=${BASE:-/tmp/mainsrc}
NEW=$PWD/src
for model in ${MODELS:-llama-3.1-8b qwen3-0.6b}; do
  for tree in ${TREES:-base new}; do
    src=$NEW; [ $tree = base ] && src=$BASE
    [ -d $src/quire ] || { echo "NO TREE $src"; continue; }
    cache=$(mktemp -d)
    for state in ${CACHES:-cold warm}; do
      echo "== $model $tree $state"
      BEGAN=$(date +%s.%N) TRITON_CACHE_DIR=$cache TOKENS=1 PYTHONPATH=$src:/tmp/site timeout 60 \
        python3 -P gpu_phases.py .gpu-pack/configs/$model > /tmp/start.out 2> /tmp/start.err
      echo "rc $?"; grep -E "^(PHASES|SPENT|LEFT|TOKENS)" /tmp/start.out || tail -5 /tmp/start.err
      grep -i -E "does not compile|in one process" /tmp/start.err | head -3
    done
    echo "cache entries $(ls $cache | wc -l)"
  done
done
