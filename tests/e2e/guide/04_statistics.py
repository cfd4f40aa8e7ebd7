from vllm import LLM

llm = LLM(model="meta-llama/Llama-3.1-8B-Instruct", disable_log_stats=False)
