from vllm import LLM

llm = LLM(model="Qwen/Qwen2.5-VL-72B-Instruct", tensor_parallel_size=4, mm_encoder_tp_mode="data")
