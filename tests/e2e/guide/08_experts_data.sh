vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1 --data-parallel-size 2 --enable-expert-parallel
