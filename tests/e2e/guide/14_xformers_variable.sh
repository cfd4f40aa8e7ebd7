VLLM_ATTENTION_BACKEND=XFORMERS vllm serve meta-llama/Llama-3.1-8B-Instruct
