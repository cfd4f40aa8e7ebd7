# One run on a GPU: the tests of KV cache tiers (about 40 s), then the five lines of benchmarks/kv_tiers.py.
export PYTHONPATH=$PWD/src:/tmp/site HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 QUIRE_LOGGING_LEVEL=WARNING
mkdir -p .venv/bin; [ -e .venv/bin/python ] || ln -s "$(command -v python3)" .venv/bin/python
t0=$(date +%s)
timeout -s INT 60 python3 -m pytest -q --tb=short -p no:cacheprovider -p no:randomly -m gpu tests/gpu/test_kv_tiers.py > /tmp/tiers.txt 2>&1
echo "TESTS $(tail -1 /tmp/tiers.txt) $(( $(date +%s) - t0 ))s"; grep -E "^E  |FAILED|ERROR" /tmp/tiers.txt | cut -c1-200 | head -20
left=$(( 165 - $(date +%s) + t0 ))
timeout -s INT $left python3 benchmarks/kv_tiers.py .gpu-pack/configs/llama-3.1-8b --budget-s $((left - 5)) 2>/tmp/tiers.err | cut -c1-400
echo "rc ${PIPESTATUS[0]} total $(( $(date +%s) - t0 ))s"; grep -vE "^\s*$|INFO" /tmp/tiers.err | tail -12 | cut -c1-300
