//! Drafter folders: written, read back, and read as others publish them.
//!
//! Job: prove that any small drafter survives an export in both spellings bit for bit, and that each kind of foreign or broken
//! folder is refused by name. Invariant: nothing half-written is ever left in place.

use std::collections::BTreeMap;
use std::path::Path;

use drafthorse_models::draft_config::{DraftConfig, LayerKind, TargetDims};
use drafthorse_models::draft_folder::DraftFolder;
use drafthorse_models::export::{ExportError, ExportReport, ExportRequest, Format, Verifier, Weights, export};
use drafthorse_models::rope::{RopeScaling, RopeSpec};
use drafthorse_models::serve::serve_commands;
use drafthorse_models::tensor_names::{draft_sources, plain_tensors};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn small() -> DraftConfig {
    DraftConfig {
        hidden: 8,
        intermediate: 12,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        target_hidden: 8,
        target_layers: 9,
        target_layer_ids: vec![1, 3, 6],
        block_size: 8,
        mask_token_id: 31,
        rms_eps: 1e-6,
        rope: RopeSpec::full(1e6, 6),
        layer_types: vec![LayerKind::Full; 2],
        sliding_window: None,
        max_positions: 64,
        vocab: 32,
    }
}

/// The program's tensors by name.
type Masters = BTreeMap<String, Vec<f32>>;

/// fp32 masters that bf16 cannot hold, different in every element.
fn masters(config: &DraftConfig) -> Masters {
    let mut next = 0u32;
    draft_sources(config)
        .into_iter()
        .map(|fused| {
            let values = (0..fused.elements()).map(|_| {
                next += 1;
                (f64::from(next) * 0.618_033_988_75).fract() as f32 - 0.5
            });
            (fused.name.clone(), values.collect())
        })
        .collect()
}

fn verifier() -> Verifier {
    Verifier { name_or_path: "org/target".to_owned(), architectures: vec!["Qwen3ForCausalLM".to_owned()] }
}

fn write(
    folder: &Path,
    format: Format,
    config: &DraftConfig,
    masters: &Masters,
    replace: bool,
) -> Result<ExportReport, ExportError> {
    let weights = masters.iter().map(|(name, values)| (name.clone(), Weights::F32(values))).collect();
    let provenance = BTreeMap::from([("build".to_owned(), "abc".to_owned()), ("step".to_owned(), "7".to_owned())]);
    export(&ExportRequest { folder, format, config, weights: &weights, verifier: &verifier(), provenance: &provenance, replace })
}

fn config_json(folder: &Path) -> Map<String, Value> {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn names_in(parent: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(parent).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn scalings() -> impl Strategy<Value = RopeScaling> {
    prop_oneof![
        Just(RopeScaling::Default {}),
        (1.0f64..50.0).prop_map(|factor| RopeScaling::Linear { factor }),
        (1.0f64..50.0, 1usize..9000, 1.0f64..2.0).prop_map(|(factor, original, low)| RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: low + 3.0,
            original_max_position_embeddings: original,
        }),
        (1.0f64..50.0, 1usize..9000, prop::option::of(0.1f64..2.0), prop::option::of(0.1f64..2.0), any::<bool>()).prop_map(
            |(factor, original, attention_factor, mscale, truncate)| RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                attention_factor,
                beta_fast: 30.0,
                beta_slow: 1.5,
                mscale,
                mscale_all_dim: mscale.map(|m| m * 0.7),
                truncate,
            }
        ),
    ]
}

prop_compose! {
    fn any_drafter()(
        (hidden, intermediate, layers) in (1usize..9, 1usize..9, 1usize..4),
        (kv_heads, groups, half_head) in (1usize..3, 1usize..4, 1usize..5),
        (target_layers, ids) in (3usize..30)
            .prop_flat_map(|l| (Just(l), prop::sample::subsequence((0..l - 1).collect::<Vec<_>>(), 1..l.min(6)))),
        (block_size, vocab, max_positions) in (2usize..20, 1usize..99, 20usize..300),
        (theta, rms_eps, scaling) in (1.5f64..1e7, 1e-9f64..1e-2, scalings()),
        (sliding, window) in (prop::collection::vec(any::<bool>(), 3), 20usize..4000),
        mask in any::<prop::sample::Index>(),
    ) -> DraftConfig {
        let layer_types: Vec<LayerKind> =
            sliding.iter().take(layers).map(|s| if *s { LayerKind::Sliding } else { LayerKind::Full }).collect();
        let head_dim = 2 * half_head;
        DraftConfig {
            hidden, intermediate, layers, heads: kv_heads * groups, kv_heads, head_dim, target_hidden: hidden,
            target_layers, target_layer_ids: ids, block_size, mask_token_id: mask.index(vocab) as u32, rms_eps,
            rope: RopeSpec { theta, head_dim, rotary_dim: head_dim, scaling },
            sliding_window: layer_types.contains(&LayerKind::Sliding).then_some(window),
            layer_types, max_positions, vocab,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_small_drafter_survives_both_formats(config in any_drafter()) {
        let dir = tempfile::tempdir().unwrap();
        let masters = masters(&config);
        for format in [Format::Plain, Format::Speculators] {
            let folder = dir.path().join(format.as_str());
            let report = write(&folder, format, &config, &masters, false).unwrap();
            let opened = DraftFolder::open(&folder, config.target_dims()).unwrap();
            prop_assert_eq!(&opened.config, &config);
            prop_assert_eq!(opened.format, format);
            prop_assert!(opened.warnings.is_empty());
            let mut bytes = 0;
            for fused in opened.tensors() {
                let mut values = vec![0.0f32; fused.elements()];
                opened.read_f32(&fused, &mut values).unwrap();
                let rounded: Vec<f32> = masters[&fused.name].iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
                prop_assert_eq!(values, rounded);
                bytes += 2 * fused.elements() as u64;
            }
            prop_assert_eq!((report.compared_bytes, report.parameters), (bytes, bytes / 2));
            prop_assert_eq!(report.tensors, 3 + 11 * config.layers);
        }
        let weights = |format: Format| std::fs::read(dir.path().join(format.as_str()).join("model.safetensors")).unwrap();
        prop_assert_eq!(weights(Format::Plain), weights(Format::Speculators));
    }

    #[test]
    fn plain_tensors_partition_the_programs(config in any_drafter()) {
        let mut next: BTreeMap<String, usize> = BTreeMap::new();
        for spec in plain_tensors(&config) {
            let end = next.entry(spec.source.tensor.clone()).or_default();
            prop_assert_eq!(spec.source.rows.start, *end);
            prop_assert_eq!(spec.source.rows.len(), spec.shape[0]);
            *end = spec.source.rows.end;
        }
        for fused in draft_sources(&config) {
            prop_assert_eq!(next[&fused.name], fused.shape[0]);
        }
    }
}

#[test]
fn five_layers_make_the_58_published_tensors() {
    let mut config = small();
    config.layers = 5;
    config.layer_types = vec![LayerKind::Full; 5];
    let specs = plain_tensors(&config);
    assert_eq!(specs.len(), 58);
    let shape = |name: &str| specs.iter().find(|spec| spec.name == name).map(|spec| spec.shape.clone()).unwrap();
    assert_eq!(shape("fc.weight"), [8, 3 * 8]);
    assert_eq!(shape("hidden_norm.weight"), [8]);
    assert_eq!(shape("norm.weight"), [8]);
    assert_eq!(shape("layers.4.self_attn.q_proj.weight"), [24, 8]);
    assert_eq!(shape("layers.4.self_attn.k_proj.weight"), [12, 8]);
    assert_eq!(shape("layers.4.self_attn.v_proj.weight"), [12, 8]);
    assert_eq!(shape("layers.4.self_attn.o_proj.weight"), [8, 24]);
    assert_eq!(shape("layers.4.self_attn.q_norm.weight"), [6]);
    assert_eq!(shape("layers.4.self_attn.k_norm.weight"), [6]);
    assert_eq!(shape("layers.4.mlp.gate_proj.weight"), [12, 8]);
    assert_eq!(shape("layers.4.mlp.up_proj.weight"), [12, 8]);
    assert_eq!(shape("layers.4.mlp.down_proj.weight"), [8, 12]);
    assert_eq!(shape("layers.4.input_layernorm.weight"), [8]);
    assert_eq!(shape("layers.4.post_attention_layernorm.weight"), [8]);
    let v = specs.iter().find(|spec| spec.name == "layers.4.self_attn.v_proj.weight").unwrap();
    assert_eq!((v.source.tensor.as_str(), v.source.rows.clone()), ("layers.4.qkv", 36..48));
}

fn no_null(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => items.iter().all(no_null),
        Value::Object(map) => map.values().all(no_null),
        _ => true,
    }
}

#[test]
fn the_written_configs_say_what_servers_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small();
    config.layer_types[0] = LayerKind::Sliding;
    config.sliding_window = Some(16);
    config.rope.scaling = RopeScaling::Linear { factor: 2.0 };
    let masters = masters(&config);
    let plain = dir.path().join("plain");
    write(&plain, Format::Plain, &config, &masters, false).unwrap();
    let map = config_json(&plain);
    assert_eq!(map["architectures"], json!(["DFlashDraftModel"]));
    assert_eq!(map["dflash_config"], json!({"mask_token_id": 31, "target_layer_ids": [1, 3, 6]}));
    assert_eq!((&map["block_size"], &map["num_target_layers"]), (&json!(8), &json!(9)));
    assert_eq!(map["rope_theta"], json!(1e6));
    assert_eq!(map["rope_scaling"], json!({"rope_type": "linear", "factor": 2.0}));
    assert_eq!(map["rope_parameters"], json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}));
    assert_eq!(map["layer_types"], json!(["sliding_attention", "full_attention"]));
    assert_eq!((&map["sliding_window"], &map["use_sliding_window"]), (&json!(16), &json!(true)));
    assert!(!map.contains_key("auto_map") && no_null(&Value::Object(map)));

    let speculators = dir.path().join("speculators");
    write(&speculators, Format::Speculators, &config, &masters, false).unwrap();
    let map = config_json(&speculators);
    assert_eq!(map["aux_hidden_state_layer_ids"], json!([2, 4, 7]), "plain id + 1");
    assert_eq!(map["speculators_config"]["proposal_methods"][0]["speculative_tokens"], json!(7));
    assert_eq!(map["speculators_config"]["verifier"]["name_or_path"], json!("org/target"));
    assert_eq!(map["draft_vocab_size"], json!(32));
    assert_eq!(map["transformer_layer_config"]["rope_parameters"]["rope_theta"], json!(1e6));
    assert!(no_null(&Value::Object(map)));

    let opened = DraftFolder::open(&plain, config.target_dims()).unwrap();
    assert_eq!(opened.provenance()["build"], "abc");
    assert_eq!(opened.provenance()["format"], "pt");
}

#[test]
fn equal_weights_give_equal_bytes_and_replacing_needs_to_be_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (config, masters) = (small(), masters(&small()));
    let folder = dir.path().join("out");
    write(&folder, Format::Plain, &config, &masters, false).unwrap();
    let first = std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(matches!(write(&folder, Format::Plain, &config, &masters, false), Err(ExportError::Exists { .. })));
    write(&folder, Format::Plain, &config, &masters, true).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), first);
    assert_eq!(names_in(dir.path()), ["out"], "nothing is left beside the export");

    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    write(&other, Format::Plain, &config, &masters, false).unwrap();
    std::fs::write(other.join("config.json"), r#"{"architectures": ["Qwen3ForCausalLM"]}"#).unwrap();
    assert!(matches!(write(&other, Format::Plain, &config, &masters, true), Err(ExportError::NotADrafter { .. })));
}

#[test]
fn wrong_weights_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    let config = small();
    let attempt = |change: &dyn Fn(&mut Masters)| {
        let mut masters = masters(&config);
        change(&mut masters);
        let error = write(&folder, Format::Plain, &config, &masters, false).unwrap_err();
        assert!(names_in(dir.path()).is_empty());
        error
    };
    let error = attempt(&|m| m.get_mut("layers.1.qkv").unwrap()[5] = f32::NAN);
    assert!(matches!(&error, ExportError::NonFinite { tensor, at: 5, .. } if tensor == "layers.1.qkv"), "{error}");
    let error = attempt(&|m| m.get_mut("fc").unwrap()[0] = f32::MAX);
    assert!(matches!(&error, ExportError::NonFinite { tensor, .. } if tensor == "fc"), "f32::MAX rounds to infinity in bf16");
    let error = attempt(&|m| drop(m.remove("hidden_norm")));
    assert!(matches!(&error, ExportError::MissingTensor(name) if name == "hidden_norm"), "{error}");
    let error = attempt(&|m| drop(m.insert("layers.2.qkv".to_owned(), vec![0.0])));
    assert!(matches!(&error, ExportError::UnknownTensor(name) if name == "layers.2.qkv"), "{error}");
    let error = attempt(&|m| m.get_mut("norm").unwrap().truncate(7));
    assert!(matches!(&error, ExportError::Size { tensor, got: 7, wanted: 8 } if tensor == "norm"), "{error}");
}

/// Changes the config of a written folder and opens it again.
fn reopened(format: Format, change: impl Fn(&mut Map<String, Value>)) -> Result<DraftFolder, String> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small();
    config.layer_types[0] = LayerKind::Sliding;
    config.sliding_window = Some(16);
    let folder = dir.path().join("drafter");
    write(&folder, format, &config, &masters(&config), false).unwrap();
    let mut map = config_json(&folder);
    change(&mut map);
    std::fs::write(folder.join("config.json"), Value::Object(map).to_string()).unwrap();
    DraftFolder::open(&folder, config.target_dims()).map_err(|error| error.to_string())
}

#[test]
fn relatives_and_contradictions_are_refused_by_key() {
    let plain: [(&str, Value, &str); 16] = [
        ("architectures", json!(["DFlash2DraftModel"]), "`architectures`"),
        ("model_type", json!("llama"), "`model_type`"),
        ("attention_bias", json!(true), "`attention_bias`"),
        ("hidden_act", json!("gelu"), "`hidden_act`"),
        ("num_experts", json!(8), "`num_experts`"),
        ("layer_types", json!(["linear_attention", "full_attention"]), "`layer_types`"),
        ("layer_types", json!(["full_attention"]), "layer_types"),
        ("use_sliding_window", json!(false), "`use_sliding_window`"),
        ("sliding_window", json!(null), "`sliding_window`"),
        ("hidden_size", json!(16), "hidden"),
        ("num_target_layers", json!(10), "target_layers"),
        ("vocab_size", json!(33), "vocab"),
        ("rope_parameters", json!({"rope_theta": 1e6, "partial_rotary_factor": 0.34}), "rope"),
        ("dflash_config", json!({"mask_token_id": 1}), "`dflash_config.target_layer_ids`"),
        ("dflash_config", json!({"mask_token_id": 1, "target_layer_ids": [1, 3, 6], "markov": 1}), "`dflash_config.markov`"),
        ("dflash_config", json!({"mask_token_id": 1, "target_layer_ids": [1, 3, 6], "causal": true}), "`dflash_config.causal`"),
    ];
    for (key, value, named) in plain {
        let error = reopened(Format::Plain, |map| drop(map.insert(key.to_owned(), value.clone()))).unwrap_err();
        assert!(error.contains(named) && error.lines().count() == 2, "{key} = {value}: {error}");
    }
    let speculators = [
        ("speculators_model_type", json!("dspark")),
        ("sample_from_anchor", json!(true)),
        ("shift_label", json!(true)),
        ("projector_type", json!("domino")),
        ("sliding_window_non_causal", json!(true)),
        ("draft_vocab_size", json!(16)),
        ("aux_hidden_state_layer_ids", json!([0, 2, 4])),
        ("mask_token_id", json!(null)),
    ];
    for (key, value) in speculators {
        let error = reopened(Format::Speculators, |map| drop(map.insert(key.to_owned(), value.clone()))).unwrap_err();
        assert!(error.contains(&format!("`{key}`")) && error.lines().count() == 2, "{key} = {value}: {error}");
    }
    // A folder whose ids ask for another number of captured layers than `fc` has columns for.
    let ids = json!({"mask_token_id": 1, "target_layer_ids": [1, 3]});
    let error = reopened(Format::Plain, |map| drop(map.insert("dflash_config".to_owned(), ids.clone()))).unwrap_err();
    assert!(error.contains("`fc.weight`") && error.contains("[8, 24]") && error.contains("[8, 16]"), "{error}");
}

#[test]
fn published_spellings_are_read() {
    let opened = reopened(Format::Plain, |map| {
        // As published: block size inside dflash_config, nulls, generation keys, code for another loader.
        map.remove("block_size");
        map.remove("num_target_layers");
        map.insert("rope_scaling".to_owned(), Value::Null);
        map.insert("bos_token_id".to_owned(), json!(1));
        map.insert("auto_map".to_owned(), json!({"AutoModel": "dflash.DFlashDraftModel"}));
        map.insert("tie_word_embeddings".to_owned(), json!(true));
        map.insert("dflash_config".to_owned(), json!({"block_size": 8, "mask_token_id": 31, "target_layer_ids": [1, 3, 6]}));
    })
    .unwrap();
    assert!(opened.warnings.is_empty(), "{:?}", opened.warnings);
    assert_eq!((opened.config.block_size, opened.config.target_layers), (8, 9));
    let opened = reopened(Format::Plain, |map| drop(map.insert("frobnicate".to_owned(), json!(1)))).unwrap();
    assert!(opened.warnings.len() == 1 && opened.warnings[0].contains("`frobnicate`"), "{:?}", opened.warnings);
    let opened = reopened(Format::Plain, |map| {
        map.remove("layer_types");
        map.insert("max_window_layers".to_owned(), json!(1));
    })
    .unwrap();
    assert_eq!(opened.config.layer_types, [LayerKind::Full, LayerKind::Sliding], "transformers' rule");
}

#[test]
fn copies_of_the_targets_tables_are_reported_and_foreign_tensors_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("drafter");
    let config = small();
    write(&folder, Format::Speculators, &config, &masters(&config), false).unwrap();
    let path = folder.join("model.safetensors");
    let written = std::fs::read(&path).unwrap();
    let with = |name: &str, dtype: safetensors::Dtype, shape: Vec<usize>| {
        let bytes = vec![0u8; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        let tensors = safetensors::SafeTensors::deserialize(&written).unwrap();
        let mut all = tensors.tensors();
        all.push((name.to_owned(), safetensors::tensor::TensorView::new(dtype, shape, &bytes).unwrap()));
        std::fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
        DraftFolder::open(&folder, config.target_dims()).map_err(|error| error.to_string())
    };
    let opened = with("lm_head.weight", safetensors::Dtype::BF16, vec![32, 8]).unwrap();
    assert!(opened.warnings.len() == 1 && opened.warnings[0].contains("`lm_head.weight`"), "{:?}", opened.warnings);
    for (name, dtype, shape) in [
        ("lm_head.weight", safetensors::Dtype::BF16, vec![16, 8]),
        ("d2t", safetensors::Dtype::I64, vec![32]),
        ("markov_head.w1.weight", safetensors::Dtype::BF16, vec![2, 2]),
    ] {
        let error = with(name, dtype, shape).unwrap_err();
        assert!(error.contains(name) && error.lines().count() == 2, "{error}");
    }
}

#[test]
fn a_drafter_of_another_target_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("drafter");
    let config = small();
    write(&folder, Format::Plain, &config, &masters(&config), false).unwrap();
    let dims = config.target_dims();
    for (other, named) in [
        (TargetDims { hidden: 16, ..dims }, "target_hidden"),
        (TargetDims { layers: 12, ..dims }, "target_layers"),
        (TargetDims { vocab: 64, ..dims }, "vocab"),
    ] {
        let error = DraftFolder::open(&folder, other).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("drafter"), "{error}");
    }
}

#[test]
fn serve_lines_carry_the_blocks_numbers_and_quote_paths() {
    let commands = serve_commands("org/target", "out/my run", Format::Plain, &small());
    assert_eq!(
        commands[0].command,
        r#"vllm serve org/target --speculative-config '{"method":"dflash","model":"out/my run","num_speculative_tokens":7}'"#
    );
    assert_eq!(
        commands[1].command,
        "python -m sglang.launch_server --model-path org/target --speculative-algorithm DFLASH \
         --speculative-draft-model-path 'out/my run' --speculative-dflash-block-size 8"
    );
    let only = serve_commands("t", "d", Format::Speculators, &small());
    assert_eq!(only.iter().map(|command| command.server).collect::<Vec<_>>(), ["vllm"]);
}
