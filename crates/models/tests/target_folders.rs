//! Target folders as they come: fixtures that have broken trainers, and small checkpoints built here to break this one.
//!
//! Job: prove what opening a target accepts and refuses. Invariant: every refusal names the file, key or tensor.

use std::path::{Path, PathBuf};

use drafthorse_models::checkpoint::{Checkpoint, CheckpointError, StoredDtype};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::{Family, TargetConfig};
use drafthorse_models::rope::RopeScaling;
use drafthorse_models::tensor_names::{EMBEDDING, HEAD, expected_tensors, target_sources};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn config(name: &str) -> TargetConfig {
    TargetConfig::from_file(&fixture(name)).unwrap()
}

#[test]
fn a_tied_single_file_needs_no_index_and_its_head_is_the_embedding() {
    let folder = fixture("ckpt_tied_single");
    let config = TargetConfig::open(&folder).unwrap();
    assert!(config.tie_embeddings && config.family == Family::Qwen3);
    assert!(expected_tensors(&config).iter().all(|(name, _)| name != HEAD));
    assert_eq!(target_sources(&config).last().unwrap().parts[0].name, EMBEDDING);
    let checkpoint = Checkpoint::open_canonical(&folder, config.tie_embeddings).unwrap();
    let (head, embedding) = (checkpoint.tensor(HEAD).unwrap(), checkpoint.tensor(EMBEDDING).unwrap());
    assert_eq!(head.bytes.as_ptr(), embedding.bytes.as_ptr());
    assert_eq!((head.shape, head.dtype), (&[64usize, 8][..], StoredDtype::Bf16));
    // The fixture holds no layers; a whole model is refused with every absent tensor named.
    let Err(CheckpointError::Missing { tensors, .. }) = Checkpoint::open_target(&folder, &config) else { panic!("accepted") };
    assert_eq!(tensors.len(), 4 * 11);
    assert!(tensors.contains(&"model.layers.3.self_attn.q_norm.weight".to_owned()));
}

#[test]
fn a_missing_shard_is_named_before_anything_is_loaded() {
    let folder = fixture("ckpt_missing_shard");
    let config = TargetConfig::open(&folder).unwrap();
    let error = Checkpoint::open_target(&folder, &config).unwrap_err();
    assert!(matches!(&error, CheckpointError::MissingShards { shards, .. } if shards == &["model-00001-of-00002.safetensors"]));
    assert!(error.to_string().contains("model-00001-of-00002.safetensors"), "{error}");
}

#[test]
fn partial_rotary_is_the_targets_and_not_the_drafters() {
    let target = config("config_partial_rope.json");
    assert_eq!((target.rope.head_dim, target.rope.rotary_dim, target.rope.theta), (256, 64, 1e7));
    assert_eq!(target.rope.inv_freq().len(), 32);
    assert!(target.warnings.iter().any(|line| line.contains("overruled")), "{:?}", target.warnings);
    let draft = DraftConfig::default_for(&target, 63).unwrap();
    assert_eq!((draft.rope.rotary_dim, draft.rope.theta), (256, 1e7));
}

#[test]
fn yarn_in_the_new_form_only_is_read_and_not_inherited() {
    let target = config("config_yarn_new_only.json");
    assert!(matches!(target.rope.scaling, RopeScaling::Yarn { factor: 4.0, original_max_position_embeddings: 32, .. }));
    assert_eq!(target.rope.theta, 1e6);
    assert_eq!(DraftConfig::default_for(&target, 63).unwrap().rope.scaling, RopeScaling::Default {});
}

#[test]
fn head_dim_comes_from_the_config() {
    let target = config("config_odd_head_dim.json");
    assert_eq!((target.hidden, target.head_dim, target.q_width(), target.kv_width()), (20, 16, 64, 16));
    let shapes = expected_tensors(&target);
    let shape = |name: &str| shapes.iter().find(|(n, _)| n == name).map(|(_, shape)| shape.clone()).unwrap();
    assert_eq!(shape("model.layers.0.self_attn.q_proj.weight"), [64, 20]);
    assert_eq!(shape("model.layers.0.self_attn.o_proj.weight"), [20, 64]);
}

/// A tensor to be written: name, dtype, shape, bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

fn write(path: &Path, tensors: &[Stored]) {
    let views =
        tensors.iter().map(|(name, dtype, shape, bytes)| (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A whole tiny target whose elements count up, f32, under `prefix`.
fn whole(config: &TargetConfig, prefix: &str) -> Vec<Stored> {
    let mut next = 0u32;
    expected_tensors(config)
        .into_iter()
        .map(|(name, shape)| {
            let name = name.strip_prefix("model.").map_or(name.clone(), |rest| format!("{prefix}{rest}"));
            let n: usize = shape.iter().product();
            let bytes = (0..n)
                .flat_map(|_| {
                    next += 1;
                    (next as f32).to_le_bytes()
                })
                .collect();
            (name, Dtype::F32, shape, bytes)
        })
        .collect()
}

fn tiny() -> TargetConfig {
    let mut config = config("config_odd_head_dim.json");
    config.layers = 2;
    config
}

#[test]
fn every_prefix_resolves_and_fused_rows_are_in_order() {
    let config = tiny();
    for prefix in ["model.", "model.language_model.", ""] {
        let dir = tempfile::tempdir().unwrap();
        let mut tensors = whole(&config, prefix);
        tensors.push((format!("{prefix}layers.0.self_attn.rotary_emb.inv_freq"), Dtype::I64, vec![1], vec![0; 8]));
        tensors.push((format!("{prefix}layers.1.self_attn.rotary_emb.inv_freq"), Dtype::I64, vec![1], vec![0; 8]));
        write(&dir.path().join("model.safetensors"), &tensors);
        let (checkpoint, extras) = Checkpoint::open_target(dir.path(), &config).unwrap();
        assert_eq!(extras.len(), 1, "{extras:?}");
        assert_eq!(
            (extras[0].pattern.as_str(), extras[0].count, extras[0].bytes),
            ("model.layers.{i}.self_attn.rotary_emb.inv_freq", 2, 16)
        );
        let sources = target_sources(&config);
        let qkv = sources.iter().find(|fused| fused.name == "layers.1.qkv").unwrap();
        assert_eq!(qkv.shape, [64 + 2 * 16, 20]);
        let mut rows = vec![0.0f32; qkv.elements()];
        checkpoint.read_f32(qkv, &mut rows).unwrap();
        let first = |name: &str| {
            let bytes = checkpoint.tensor(name).unwrap().bytes;
            f32::from_le_bytes(bytes[..4].try_into().unwrap())
        };
        assert_eq!(rows[0], first("model.layers.1.self_attn.q_proj.weight"));
        assert_eq!(rows[64 * 20], first("model.layers.1.self_attn.k_proj.weight"));
        assert_eq!(rows[80 * 20], first("model.layers.1.self_attn.v_proj.weight"));
    }
}

#[test]
fn wrong_shapes_dtypes_lengths_and_doubles_are_named() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let refused = |tensors: &[Stored]| {
        write(&path, tensors);
        Checkpoint::open_target(dir.path(), &config).unwrap_err()
    };
    let good = whole(&config, "model.");
    let down = good.iter().position(|(name, ..)| name == "model.layers.1.mlp.down_proj.weight").unwrap();

    let mut wrong = good.clone();
    wrong[down].2.reverse();
    let error = refused(&wrong);
    assert!(
        matches!(&error, CheckpointError::Shape { tensor, got, wanted, .. }
        if tensor == "model.layers.1.mlp.down_proj.weight" && got == &[16, 20] && wanted == &[20, 16]),
        "{error}"
    );

    let mut wrong = good.clone();
    wrong[down].1 = Dtype::I32;
    let error = refused(&wrong);
    assert!(error.to_string().contains("model.layers.1.mlp.down_proj.weight") && error.to_string().contains("I32"), "{error}");

    write(&path, &good);
    let bytes = std::fs::read(&path).unwrap();
    for cut in [1, bytes.len() / 2, bytes.len() - 4] {
        std::fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        let error = Checkpoint::open_target(dir.path(), &config).unwrap_err();
        assert!(matches!(&error, CheckpointError::Length { have, want, .. } if have < want), "{cut}: {error}");
    }
    std::fs::write(&path, [&bytes[..], &[0; 3]].concat()).unwrap();
    let error = Checkpoint::open_target(dir.path(), &config).unwrap_err();
    let (have, want) = (bytes.len() as u64 + 3, bytes.len() as u64);
    assert!(matches!(&error, CheckpointError::Length { have: h, want: w, .. } if (*h, *w) == (have, want)), "{error}");
    std::fs::write(&path, [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat()).unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::Header { .. })));
}

#[test]
fn a_tensor_that_the_config_does_not_speak_of_is_an_error_and_a_harmless_one_is_listed() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let with = |name: &str| {
        let mut tensors = whole(&config, "model.");
        tensors.push((name.to_owned(), Dtype::F32, vec![20], vec![0; 80]));
        write(&path, &tensors);
        Checkpoint::open_target(dir.path(), &config)
    };
    for name in [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.mlp.gate_proj.bias",
        "model.layers.1.self_attn.sinks",
        "model.layers.2.input_layernorm.weight",
        "model.norm.bias",
        "model.embed_positions.weight",
        // Under another prefix than the rest: which of the two is meant cannot be known.
        "norm.weight",
        "layers.0.self_attn.q_proj.weight",
    ] {
        let Err(error) = with(name) else { panic!("{name} was passed over") };
        let text = error.to_string();
        assert!(matches!(error, CheckpointError::NotOfTheModel { .. }) && text.lines().count() == 2, "{name}: {text}");
        assert!(text.contains(&format!(": {name}\n")), "{text}");
    }
    for name in
        ["model.rotary_emb.inv_freq", "model.visual.blocks.0.norm1.weight", "vision_tower.patch_embed.weight", "mtp.fc.weight"]
    {
        assert_eq!(with(name).unwrap().1.len(), 1, "{name}");
    }
}

#[test]
fn a_git_lfs_pointer_is_called_one() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let text = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n", "0".repeat(64));
    std::fs::write(dir.path().join("model.safetensors"), text).unwrap();
    let error = Checkpoint::open_target(dir.path(), &config).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, CheckpointError::LfsPointer { .. }) && text.contains("model.safetensors is a Git LFS pointer"),
        "{text}"
    );
}

#[test]
fn an_index_must_agree_with_its_shards() {
    let config = tiny();
    let dir = tempfile::tempdir().unwrap();
    let tensors = whole(&config, "model.");
    let (first, second) = tensors.split_at(7);
    write(&dir.path().join("a.safetensors"), first);
    write(&dir.path().join("b.safetensors"), second);
    let index = |place: &dyn Fn(usize) -> String| {
        let map: serde_json::Map<String, serde_json::Value> =
            tensors.iter().enumerate().map(|(i, (name, ..))| (name.clone(), place(i).into())).collect();
        let text = serde_json::json!({"weight_map": map}).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    };
    let right = |i: usize| if i < 7 { "a.safetensors" } else { "b.safetensors" }.to_owned();
    index(&right);
    assert!(Checkpoint::open_target(dir.path(), &config).unwrap().1.is_empty());
    index(&|i| if i == 9 { "a.safetensors".to_owned() } else { right(i) });
    let error = Checkpoint::open_target(dir.path(), &config).unwrap_err();
    assert!(matches!(&error, CheckpointError::Index { detail, .. } if detail.contains(&tensors[9].0)), "{error}");
    index(&|_| "../a.safetensors".to_owned());
    assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::Index { .. })));
    write(&dir.path().join("b.safetensors"), &tensors[6..]);
    index(&right);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Duplicate { tensor, .. } if *tensor == tensors[6].0), "{error}");
}

#[test]
fn a_folder_without_safetensors_says_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains("pytorch_model.bin"), "{error}");
}

#[test]
fn a_tied_head_that_differs_is_refused() {
    let mut config = tiny();
    config.tie_embeddings = true;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let mut tensors = whole(&config, "model.");
    let mut head = tensors[0].clone();
    head.0 = HEAD.to_owned();
    tensors.push(head);
    write(&path, &tensors);
    let (_, extras) = Checkpoint::open_target(dir.path(), &config).unwrap();
    assert_eq!(extras[0].pattern, HEAD);
    tensors.last_mut().unwrap().3[5] ^= 1;
    write(&path, &tensors);
    assert!(matches!(Checkpoint::open_target(dir.path(), &config), Err(CheckpointError::TiedHeadDiffers { .. })));
}

#[test]
fn conversions_are_exact_or_rounded_to_even() {
    let dir = tempfile::tempdir().unwrap();
    // More than one conversion chunk, so that the split is crossed.
    let n = 70_000usize;
    let values: Vec<f32> = (0..n).map(|i| (i as f32 - 35_000.0) * 1.003).collect();
    let f32_bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let f16_bytes = values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
    let bf16_bytes = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    write(
        &dir.path().join("model.safetensors"),
        &[
            ("a".to_owned(), Dtype::F32, vec![n], f32_bytes),
            ("b".to_owned(), Dtype::F16, vec![n], f16_bytes),
            ("c".to_owned(), Dtype::BF16, vec![n], bf16_bytes),
        ],
    );
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let (mut wide, mut narrow) = (vec![0.0f32; n], vec![0u16; n]);
    for name in ["a", "b", "c"] {
        checkpoint.tensor(name).unwrap().to_f32(&mut wide);
        checkpoint.tensor(name).unwrap().to_bf16(&mut narrow);
        for (i, x) in values.iter().enumerate() {
            let stored = match name {
                "a" => *x,
                "b" => half::f16::from_f32(*x).to_f32(),
                _ => half::bf16::from_f32(*x).to_f32(),
            };
            assert_eq!(wide[i], stored, "{name}[{i}]");
            assert_eq!(narrow[i], half::bf16::from_f32(stored).to_bits(), "{name}[{i}]");
        }
    }
}
