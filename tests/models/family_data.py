"""What the small models of `every_family.py` need besides the rules for all, as data."""

from __future__ import annotations

from typing import Any

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_RT_DETR: dict[str, Any] = {
    "options": {
        "encoder_in_channels": [8, 8, 8],
        "decoder_in_channels": [32, 32, 32],
        "d_model": 32,
        "encoder_hidden_dim": 32,
        "num_denoising": 0,
        "backbone_config": _RESNET | {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]},
    },
    "inputs": {"pixel_values": (2, 3, 64, 64)},
}
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "input_size": 1,
}
_SERIES_INPUTS = {
    "past_values": (2, 10),
    "past_time_features": (2, 10, 1),
    "past_observed_mask": ("true", 2, 10),
    "future_values": (2, 4),
    "future_time_features": (2, 4, 1),
}
_SWIN = {"image_size": 32, "depths": (1, 1), "num_heads": (2, 2)}
_DETR = {
    "options": {"backbone_config": _RESNET | {"out_features": ["stage4"]}, "backbone": None},
    "inputs": {"pixel_values": (2, 3, 64, 64)},
}
_SEAMLESS = {
    "options": {
        "speech_encoder_attention_heads": 2,
        "speech_encoder_intermediate_size": 52,
        "speech_encoder_layers": 2,
        "t2u_bos_token_id": 1,
        "t2u_pad_token_id": 0,
        "t2u_eos_token_id": 2,
        "t2u_decoder_start_token_id": 1,
        "t2u_encoder_layers": 1,
        "t2u_decoder_layers": 1,
        "t2u_encoder_attention_heads": 2,
        "t2u_decoder_attention_heads": 2,
        "t2u_encoder_ffn_dim": 52,
        "t2u_decoder_ffn_dim": 52,
        "unit_embed_dim": 8,
        "lang_embed_dim": 8,
        "spkr_embed_dim": 8,
        "upsample_initial_channel": 64,
        "unit_hifi_gan_vocab_size": 20,
        "t2u_vocab_size": 20,
        "variance_predictor_embed_dim": 8,
        "variance_predictor_hidden_dim": 8,
    }
}
_WORDS = ("words", 2, 7)

SPECIAL: dict[str, dict[str, Any]] = {
    "flava": {"inputs": {"input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)}},
    "git": {"inputs": {"input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)}},
    "bros": {"options": {"hidden_size": 64, "dim_bbox": 8}, "inputs": {"input_ids": _WORDS, "bbox": (2, 7, 8)}},
    "cvt": {
        "options": {"embed_dim": [8, 12, 24], "num_heads": [1, 1, 2], "depth": [1, 2, 3]},
        "inputs": {"pixel_values": (2, 3, 32, 32)},
    },
    "cohere2_vision": {"options": {"alignment_intermediate_size": 52}},
    "llama4": {
        "options": {"vision_config": {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}}
    },
    "maskformer": {"options": {"fpn_feature_size": 32, "mask_feature_size": 32}},
    "florence2": {
        "options": {
            "vision_config": {"embed_dim": [8, 12, 20, 24], "num_heads": [1, 2, 2, 2], "num_groups": [1, 2, 2, 2]}
        }
    },
    "qwen3_asr": {"options": {"audio_config": {"downsample_hidden_size": 8}}},
    "aria": {"options": {"projector_patch_to_query_dict": {16: 5}}},
    "exaone4_5": {"options": {"vision_config": {"window_size": 16}}},
    "gemma3": {"options": {"mm_tokens_per_image": 4}},
    "llava_next": {"options": {"image_grid_pinpoints": [[16, 16]]}},
    "llava_onevision": {"options": {"image_grid_pinpoints": [[16, 16]]}},
    "vipllava": {"options": {"vision_feature_layers": [-1, -2]}},
    "internvl": {"options": {"image_seq_length": 4, "vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}}},
    "internvl_vision": {"options": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "qianfan_ocr": {
        "options": {"image_seq_length": 4, "vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}}
    },
    "convnext": {"options": {"image_size": 64}},
    "convnextv2": {"options": {"image_size": 64}},
    "moonshine": {"inputs": {"input_values": (2, 2000), "decoder_input_ids": _WORDS}},
    "segformer": {
        "inputs": {"pixel_values": (2, 3, 64, 64)},
        "options": {"hidden_sizes": [8, 12, 20, 24], "num_attention_heads": [1, 2, 2, 2]},
    },
    "glpn": {
        "inputs": {"pixel_values": (2, 3, 64, 64)},
        "options": {"hidden_sizes": [8, 12, 20, 24], "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 8},
    },
    "pvt_v2": {"inputs": {"pixel_values": (2, 3, 64, 64)}},
    "speech_to_text": {
        "options": {"input_feat_per_channel": 8, "conv_channels": 20},
        "inputs": {"input_features": (2, 32, 8), "decoder_input_ids": _WORDS},
    },
    "wav2vec2-bert": {"inputs": {"input_features": (2, 16, 160)}},
    "speecht5": {"model": "SpeechT5ForSpeechToText", "inputs": {"input_values": (2, 800), "decoder_input_ids": _WORDS}},
    "swin": {"options": _SWIN},
    "donut-swin": {"options": _SWIN},
    "swinv2": {"options": _SWIN},
    "swin2sr": {
        "options": {"image_size": 16, "patch_size": 1, "depths": [1, 1], "num_heads": [2, 2]},
        "inputs": {"pixel_values": (2, 3, 16, 16)},
    },
    "layoutlmv3": {"options": {"coordinate_size": 4, "shape_size": 4}},
    "sam": {
        "options": {
            "vision_config": {"output_channels": 24, "mlp_dim": 52, "num_pos_feats": 12},
            "prompt_encoder_config": {"image_embedding_size": 4},
        }
    },
    "stablelm": {
        "options": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    },
    "yolos": {"options": {"image_size": [16, 16]}, "inputs": {"pixel_values": (2, 3, 16, 16)}},
    "decision_transformer": {
        "inputs": {
            "states": (2, 5, 17),
            "actions": (2, 5, 4),
            "rewards": (2, 5, 1),
            "returns_to_go": (2, 5, 1),
            "timesteps": ("below", 20, 2, 5),
            "attention_mask": ("ones", 2, 5),
        }
    },
    "parakeet_encoder": {"inputs": {"input_features": (2, 64, 8)}},
    "parakeet_ctc": {"inputs": {"input_features": (2, 64, 8)}},
    "lasr_encoder": {"options": {"conv_kernel_size": 5}, "inputs": {"input_features": (2, 64, 8)}},
    "lasr_ctc": {"options": {"encoder_config": {"conv_kernel_size": 5}}, "inputs": {"input_features": (2, 64, 8)}},
    "siglip2": {
        "options": {"vision_config": {"num_patches": 16}},
        "inputs": {
            "input_ids": _WORDS,
            "pixel_values": (2, 16, 48),
            "pixel_attention_mask": ("ones", 2, 16),
            "spatial_shapes": ("exactly", [[4, 4], [4, 4]]),
        },
    },
    "timesfm": {"inputs": {"past_values": (2, 64), "past_values_padding": ("zeros", 2, 64), "freq": ("zeros", 2, 1)}},
    "timesfm2_5": {"inputs": {"past_values": (2, 64)}},
    "codegen": {"options": {"n_head": 4, "n_embd": 32, "n_inner": 52}},
    "dia": {
        "options": {
            "decoder_config": {
                "cross_num_attention_heads": 2,
                "cross_head_dim": 12,
                "cross_num_key_value_heads": 2,
                "cross_hidden_size": 24,
            }
        },
        "inputs": {"input_ids": _WORDS, "decoder_input_ids": ("words", 2, 7, 9)},
    },
    "qwen2_vl": {"options": {"text_config": {"rope_parameters": _MROPE}}},
    "qwen2_5_vl": {"options": {"text_config": {"rope_parameters": _MROPE}, "vision_config": {"window_size": 16}}},
    "glm4v": {"options": {"text_config": {"rope_parameters": _MROPE}}},
    "glm_ocr": {"options": {"text_config": {"rope_parameters": _MROPE}}},
    "glm_image_text": {"options": {"rope_parameters": _MROPE}},
    "paddleocr_vl": {"options": {"text_config": {"rope_parameters": _MROPE}}},
    "gpt_neo": {"options": {"attention_types": [[["global", "local"], 1]], "num_layers": 2}},
    "mamba2": {"options": {"num_heads": 4, "head_dim": 12, "n_groups": 1, "chunk_size": 8}},
    "bamba": {"options": {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_chunk_size": 8}},
    "granitemoehybrid": {
        "options": {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_chunk_size": 8, "shared_intermediate_size": 52}
    },
    "falcon_h1": {"options": {"mamba_chunk_size": 8}},
    "zamba": {"options": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}},
    "zamba2": {"options": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}},
    "perceiver": {
        "options": {
            "d_latents": 24,
            "num_latents": 5,
            "num_self_attends_per_block": 2,
            "num_cross_attention_heads": 2,
            "num_self_attention_heads": 2,
        },
        "inputs": {"inputs": (2, 7, 24)},
    },
    "blip-2": {
        "inputs": {"input_ids": ("image", 60, 5), "pixel_values": (2, 3, 16, 16)},
        "options": {"image_token_index": 60, "image_token_id": 60},
    },
    "blip_2_qformer": {"inputs": {"query_embeds": (2, 5, 24), "encoder_hidden_states": (2, 6, 24)}},
    "instructblip": {
        "inputs": {"input_ids": ("image", 60, 5), "qformer_input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)},
        "options": {"image_token_index": 60, "image_token_id": 60},
    },
    "mimi": {
        "options": {
            "num_filters": 4,
            "upsample_groups": 24,
            "codebook_dim": 12,
            "vector_quantization_hidden_dimension": 12,
            "codebook_size": 16,
        },
        "inputs": {"input_values": (2, 1, 2000)},
    },
    "timesformer": {"options": {"num_frames": 4}, "inputs": {"pixel_values": (2, 4, 3, 16, 16)}},
    "videomae": {"options": {"num_frames": 4}, "inputs": {"pixel_values": (2, 4, 3, 16, 16)}},
    "vivit": {"options": {"num_frames": 4, "tubelet_size": [2, 4, 4]}, "inputs": {"pixel_values": (2, 4, 3, 16, 16)}},
    "xclip": {
        "options": {
            "vision_config": {
                "num_frames": 4,
                "mit_hidden_size": 24,
                "mit_intermediate_size": 52,
                "mit_num_attention_heads": 2,
            },
            "prompt_num_attention_heads": 2,
        },
        "inputs": {"input_ids": _WORDS, "pixel_values": (2, 4, 3, 16, 16)},
    },
    "autoformer": {"options": _SERIES | {"label_length": 4, "moving_average": 3}, "inputs": _SERIES_INPUTS},
    "informer": {"options": _SERIES, "inputs": _SERIES_INPUTS},
    "time_series_transformer": {"options": _SERIES, "inputs": _SERIES_INPUTS},
    "patchtst": {"inputs": {"past_values": (2, 32, 1)}},
    "patchtsmixer": {"inputs": {"past_values": (2, 32, 1)}},
    "lxmert": {
        "options": {"visual_feat_dim": 12, "l_layers": 2, "x_layers": 2, "r_layers": 2},
        "inputs": {"input_ids": _WORDS, "visual_feats": (2, 5, 12), "visual_pos": (2, 5, 4)},
    },
    "vilt": {"inputs": {"input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)}},
    "udop": {"inputs": {"input_ids": _WORDS, "bbox": ("uniform", 2, 7, 4), "decoder_input_ids": _WORDS}},
    "esm": {"options": {"vocab_size": 61, "pad_token_id": 0, "mask_token_id": 3}},
    "deepseek_v2": {"options": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}},
    "hunyuan_v1_dense": {"options": {"head_dim": 12}},
    "hunyuan_v1_moe": {"options": {"head_dim": 12}},
    "ministral": {"options": {"head_dim": 12}},
    "nemotron": {"options": {"num_key_value_heads": 1, "head_dim": 12}},
    "dots1": {"options": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}},
    "detr": _DETR,
    "conditional_detr": _DETR,
    "table-transformer": _DETR,
    "dab-detr": _DETR,
    "xmod": {"options": {"default_language": "en_XX"}},
    "bridgetower": {
        "options": {
            "num_attention_heads": 2,
            "text_config": {"num_attention_heads": 2},
            "vision_config": {"num_hidden_layers": 2, "hidden_size": 64},
        },
        "inputs": {"input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)},
    },
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "aimv2": {"inputs": {"input_ids": _WORDS, "pixel_values": (2, 3, 16, 16)}},
    "idefics": {
        "inputs": {"input_ids": _WORDS, "pixel_values": (2, 1, 3, 16, 16), "image_attention_mask": ("ones", 2, 7, 1)}
    },
    "kosmos-2": {
        "inputs": {
            "input_ids": ("image", 60, 5),
            "pixel_values": (2, 3, 16, 16),
            "image_embeds_position_mask": ("exactly", [[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]] * 2),
        },
        "options": {"latent_query_num": 5},
    },
    "lfm2_moe": {"options": {"layer_types": ["conv", "full_attention"]}},
    "seggpt": {
        "options": {"image_size": [16, 8], "merge_index": 0, "intermediate_hidden_state_indices": [0, 1]},
        "inputs": {"pixel_values": (2, 3, 8, 8), "prompt_pixel_values": (2, 3, 8, 8), "prompt_masks": (2, 3, 8, 8)},
    },
    "audio-spectrogram-transformer": {
        "options": {"max_length": 32, "num_mel_bins": 16},
        "inputs": {"input_values": (2, 32, 16)},
    },
    "smolvlm_vision": {"inputs": {"pixel_values": (2, 3, 16, 16)}},
    "idefics3_vision": {"inputs": {"pixel_values": (2, 3, 16, 16)}},
    "zaya": {"options": {"num_experts_per_tok": 1}},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "gemma3n_text": {
        "options": {
            "num_kv_shared_layers": 0,
            "layer_types": ["full_attention", "full_attention"],
            "activation_sparsity_pattern": [0.95, 0.0],
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "intermediate_size": [52, 52],
        }
    },
    "fsmt": {"options": {"langs": ["en", "de"], "src_vocab_size": 61, "tgt_vocab_size": 61}},
    "roc_bert": {
        "options": {
            "shape_embed_dim": 8,
            "pronunciation_embed_dim": 8,
            "shape_vocab_size": 70,
            "pronunciation_vocab_size": 70,
        }
    },
    "vjepa2": {
        "options": {
            "crop_size": 16,
            "frames_per_clip": 4,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 2,
        },
        "inputs": {"pixel_values_videos": (2, 4, 3, 16, 16)},
    },
}

# Models of texts with images: how the images come (plain, several to a text, crops of one, with their sizes, or as the
# patches of a grid), and how many words of the text stand for one. Without a row their inputs are texts alone.
IMAGES: dict[str, tuple[str, int]] = {
    "aria": ("plain", 5), "aya_vision": ("plain", 4), "cosmos3_omni": ("grid", 4), "deepseek_vl": ("plain", 16),
    "exaone4_5": ("grid", 4), "gemma3": ("plain", 4), "glm4v": ("grid", 4), "glm_ocr": ("grid", 4),
    "got_ocr2": ("plain", 1), "idefics2": ("several", 64), "idefics3": ("several", 4), "internvl": ("plain", 4),
    "lighton_ocr": ("sizes", 4), "llava": ("plain", 16), "llava_next": ("crops", 36),
    "llava_onevision": ("crops", 36), "minimax_m3_vl": ("grid", 4), "mistral3": ("sizes", 4),
    "mistral_large4": ("sizes", 4), "modernvbert": ("several", 1), "ovis2": ("plain", 16),
    "paligemma": ("plain", 16), "qianfan_ocr": ("plain", 4), "qwen2_5_vl": ("grid", 4), "qwen2_vl": ("grid", 4),
    "qwen3_5": ("grid", 4), "qwen3_5_moe": ("grid", 4), "qwen3_vl": ("grid", 4), "qwen3_vl_moe": ("grid", 4),
    "qwen4_exp": ("grid", 4), "smolvlm": ("several", 4), "ultravbert": ("several", 1), "video_llava": ("plain", 16),
    "vipllava": ("plain", 16),
}  # fmt: skip

# Models that do not run in float64: they build masks or inputs of another width, or (timesfm) follow other branches.
NO_TRUTH = ("dab-detr", "kosmos-2", "mimi", "timesfm", "xglm")
