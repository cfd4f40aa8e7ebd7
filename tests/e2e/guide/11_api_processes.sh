vllm serve Qwen/Qwen2.5-VL-3B-Instruct --api-server-count 4
