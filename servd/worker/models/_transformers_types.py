"""The model types whose class in transformers servd was tested with. See docs/reference/models.md;
tests/parity/test_causal_classes.py runs every class and holds the list.
"""

TESTED = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 bart beam bert bert-generation biogpt
    bitnet codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2
    deepseek_v3 diffllama dory dots1 electra ernie ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
    kolibri1 laguna llama longcat_flash mbart mellum mimo_v2_flash minicpm3 minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron
    olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_moe
    roc_bert sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
    youtu
    """.split()
)

# Of these, the types whose attention, norms and rotary angles are Llama's or Qwen3's, whatever
# their options are: servd computes them itself.
LLAMA_LIKE = frozenset(
    """
    cwm dots1 exaone granite granitemoe hyperclovax internlm3 iquestcoder llama ministral mistral
    mixtral qwen2 qwen2_moe qwen3 qwen3_moe seed_oss solar_open
    """.split()
)
