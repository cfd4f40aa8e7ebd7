vllm serve TheBloke/Llama-2-7B-Chat-AWQ --quantization awq
