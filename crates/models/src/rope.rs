//! Rotary position embeddings: what a config says about them, and the exact tables that follow.
//!
//! Job: read the RoPE part of a config in every form in use (flat, `rope_parameters`, one entry per layer type), and
//! compute inverse frequencies and cos/sin tables as transformers does. It refuses types that depend on the sequence
//! length (`dynamic`, `longrope`) and keys it does not know, because a wrong rotation only shows as bad acceptance.
//! Invariants: the convention is rotate-half (NeoX): dimension `d < R/2` is paired with `d + R/2`, dimensions from R on pass
//! through; tables are fp32, `attention_factor` already multiplied in.
//!
//! Mathematics: transformers 5.17 `modeling_rope_utils.py`; YaRN is arXiv 2309.00071. `golden/rope.py` made the numbers
//! that the tests compare with.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config_fields::{ConfigError, Fields};

/// The base that transformers uses where a config names none (llama before version 3).
pub const DEFAULT_THETA: f64 = 10_000.0;

/// No model has a larger base: 1e8 is the largest in use.
const MOST_THETA: f64 = 1e12;

/// One model's rotary embedding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Width of one attention head.
    pub head_dim: usize,
    /// R: how many leading dimensions of a head are rotated. Even; equal to `head_dim` unless rotary is partial.
    pub rotary_dim: usize,
    /// How frequencies are changed for contexts longer than the model was first trained on.
    pub scaling: RopeScaling,
}

/// Changes to the frequencies, by the name that configs give in `rope_type`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// None.
    Default {},
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, a smooth band between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` stay.
        high_freq_factor: f64,
        /// Context length of the first training, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// Context length of the first training, in tokens.
        original_max_position_embeddings: usize,
        /// Multiplies cos and sin; absent, it follows from `factor` and the two mscales.
        #[serde(skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Rotations over the original context above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations over the original context below which a dimension is divided.
        beta_slow: f64,
        /// Numerator weight of the attention factor, when both mscales are given and not 0.
        #[serde(skip_serializing_if = "Option::is_none")]
        mscale: Option<f64>,
        /// Denominator weight of the attention factor.
        #[serde(skip_serializing_if = "Option::is_none")]
        mscale_all_dim: Option<f64>,
        /// Whether the borders of the ramp are rounded outward to whole dimensions.
        truncate: bool,
    },
}

impl RopeSpec {
    /// Unscaled, full rotary: what a drafter has unless its config says more.
    pub fn full(theta: f64, head_dim: usize) -> Self {
        Self { theta, head_dim, rotary_dim: head_dim, scaling: RopeScaling::Default {} }
    }

    /// What cos and sin are multiplied with; 1 except for YaRN.
    pub fn attention_factor(&self) -> f64 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = &self.scaling else { return 1.0 };
        let by_scale = |mscale: f64| if *factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        match (attention_factor, mscale, mscale_all_dim) {
            (Some(given), _, _) => *given,
            // A zero counts as absent, as it does in Python's `if mscale and mscale_all_dim`.
            (None, Some(m), Some(all)) if *m != 0.0 && *all != 0.0 => by_scale(*m) / by_scale(*all),
            _ => by_scale(1.0),
        }
    }

    /// Inverse frequencies, fp32, `[R/2]`, in radians per position.
    ///
    /// Each arithmetic step is rounded to fp32 where PyTorch rounds; only the power itself is taken in f64 and rounded
    /// once, so a value may differ from PyTorch's vectorised `pow` in its last bit.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dim = self.rotary_dim;
        let theta = f64::from(self.theta as f32);
        let pos_freq = |d: usize| theta.powf(f64::from((2 * d) as f32 / dim as f32)) as f32;
        (0..dim / 2)
            .map(|d| match &self.scaling {
                RopeScaling::Default {} => 1.0 / pos_freq(d),
                RopeScaling::Linear { factor } => 1.0 / pos_freq(d) / *factor as f32,
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                    let original = *original_max_position_embeddings as f64;
                    llama3(1.0 / pos_freq(d), *factor, *low_freq_factor, *high_freq_factor, original)
                }
                RopeScaling::Yarn { factor, .. } => {
                    let (low, high) = self.yarn_ramp();
                    let ramp = ((d as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let extrapolated = 1.0 - ramp;
                    let interpolation = 1.0 / (*factor as f32 * pos_freq(d));
                    interpolation * (1.0 - extrapolated) + (1.0 / pos_freq(d)) * extrapolated
                }
            })
            .collect()
    }

    /// Borders of YaRN's ramp, in pairs of dimensions; (0, 1) when the scaling is not YaRN, where nothing asks.
    fn yarn_ramp(&self) -> (f64, f64) {
        let RopeScaling::Yarn { original_max_position_embeddings, beta_fast, beta_slow, truncate, .. } = &self.scaling else {
            return (0.0, 1.0);
        };
        let (dim, original) = (self.rotary_dim as f64, *original_max_position_embeddings as f64);
        let border =
            |rotations: f64| (dim * (original / (rotations * 2.0 * std::f64::consts::PI)).ln()) / (2.0 * self.theta.ln());
        let (mut low, mut high) = (border(*beta_fast), border(*beta_slow));
        if *truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001; // As upstream: a ramp of width zero would divide by zero.
        }
        (low, high)
    }

    /// Tables `(cos, sin)`, each fp32 `[P, R/2]` row-major for positions `0..P`, times [`Self::attention_factor`].
    pub fn tables(&self, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let inv_freq = self.inv_freq();
        let half = inv_freq.len();
        let factor = self.attention_factor() as f32;
        let (mut cos, mut sin) = (vec![0.0f32; positions * half], vec![0.0f32; positions * half]);
        if half == 0 {
            return (cos, sin);
        }
        cos.par_chunks_mut(half).zip(sin.par_chunks_mut(half)).enumerate().for_each(|(p, (cos, sin))| {
            for ((c, s), f) in cos.iter_mut().zip(sin).zip(&inv_freq) {
                // The angle is rounded to fp32 first, as PyTorch's is: at large positions this is most of the error, and
                // a drafter must have the same error in training as in service.
                let angle = f64::from(p as f32 * f);
                *c = angle.cos() as f32 * factor;
                *s = angle.sin() as f32 * factor;
            }
        });
        (cos, sin)
    }

    /// The form of transformers 5: one object with `rope_type`, `rope_theta`, the scaling's keys, and
    /// `partial_rotary_factor` if rotary is partial.
    pub fn to_rope_parameters(&self) -> Map<String, Value> {
        let mut map = self.to_rope_scaling();
        map.insert("rope_theta".to_owned(), self.theta.into());
        if self.rotary_dim != self.head_dim {
            map.insert("partial_rotary_factor".to_owned(), (self.rotary_dim as f64 / self.head_dim as f64).into());
        }
        map
    }

    /// The older flat form's `rope_scaling` object (theta stands beside it); only `rope_type` when nothing is scaled.
    pub fn to_rope_scaling(&self) -> Map<String, Value> {
        match serde_json::to_value(&self.scaling) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("a scaling serialises to an object, not to {other:?}"),
        }
    }
}

/// Llama 3.1's rule for one frequency (transformers `_compute_llama3_parameters`).
fn llama3(inv_freq: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (2.0 * std::f64::consts::PI) as f32 / inv_freq;
    let divided = inv_freq / factor as f32;
    if wavelength > (original / low) as f32 {
        divided
    } else if wavelength < (original / high) as f32 {
        inv_freq
    } else {
        let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inv_freq / factor as f32 + smooth * inv_freq
    }
}

/// Reads the RoPE part of a config. `rope_parameters` wins over the flat form; a flat `rope_scaling` that says something
/// else is refused, a flat `rope_theta` that does is reported through `warnings`. `layer_types` are the types in use.
pub(crate) fn parse(
    config: &Fields<'_>,
    head_dim: usize,
    max_positions: usize,
    layer_types: &[&str],
    warnings: &mut Vec<String>,
) -> Result<RopeSpec, ConfigError> {
    let reader = Reader { config, head_dim, max_positions };
    let flat_theta = config.opt_f64("rope_theta")?;
    let flat_scaling = config.opt_object("rope_scaling")?.filter(|map| !map.is_empty());
    let flat = match flat_scaling {
        Some(map) => Some(reader.spec(&config.nested("rope_scaling", map), flat_theta)?),
        None => None,
    };
    let Some(new_form) = config.opt_object("rope_parameters")?.filter(|map| !map.is_empty()) else {
        if let Some(spec) = flat {
            return Ok(spec);
        }
        if flat_theta.is_none() {
            warnings.push(format!(
                "{}: no `rope_theta` and no `rope_parameters`; {DEFAULT_THETA} is used, as transformers does",
                config.path.display()
            ));
        }
        return reader.spec(&config.nested("rope_scaling", &Map::new()), flat_theta);
    };
    let spec = if new_form.values().any(Value::is_object) {
        let mut agreed: Option<RopeSpec> = None;
        for layer_type in layer_types {
            let per_type = config.nested("rope_parameters", new_form);
            let map = per_type.opt_object(layer_type)?.ok_or_else(|| per_type.missing(layer_type, "an object"))?;
            let prefix = format!("rope_parameters.{layer_type}");
            let this = reader.spec(&config.nested(&prefix, map), flat_theta)?;
            if agreed.as_ref().is_some_and(|other| *other != this) {
                return Err(config.unsupported(
                    "rope_parameters",
                    "another rotary embedding in each type of layer",
                    "use a model whose layer types share one; per-type tables are not implemented",
                ));
            }
            agreed = Some(this);
        }
        agreed.ok_or_else(|| config.missing("rope_parameters", "an object with `rope_type` and `rope_theta`"))?
    } else {
        reader.spec(&config.nested("rope_parameters", new_form), flat_theta)?
    };
    if flat.is_some_and(|flat| flat.scaling != spec.scaling) {
        return Err(config.value(
            "rope_scaling",
            "it disagrees with `rope_parameters`",
            "make the two agree, or delete `rope_scaling`; readers differ in which one they use",
        ));
    }
    if let Some(theta) = flat_theta.filter(|theta| *theta != spec.theta) {
        warnings.push(format!(
            "{}: `rope_theta` = {theta} is overruled by `rope_parameters.rope_theta` = {}",
            config.path.display(),
            spec.theta
        ));
    }
    Ok(spec)
}

/// What every form of the RoPE object needs beside the object itself.
struct Reader<'a> {
    config: &'a Fields<'a>,
    head_dim: usize,
    max_positions: usize,
}

impl Reader<'_> {
    fn spec(&self, rope: &Fields<'_>, flat_theta: Option<f64>) -> Result<RopeSpec, ConfigError> {
        let theta = rope.opt_f64("rope_theta")?.or(flat_theta).unwrap_or(DEFAULT_THETA);
        if theta <= 1.0 || theta > MOST_THETA {
            // The key is named where it stands.
            let place = if rope.get("rope_theta").is_some() { rope } else { self.config };
            let why = format!("the base lies above 1 and at most at {MOST_THETA:e}");
            return Err(place.value("rope_theta", why, "give the base that the model was trained with"));
        }
        let partial = match rope.opt_f64("partial_rotary_factor")? {
            Some(factor) => factor,
            None => self.config.opt_f64("partial_rotary_factor")?.unwrap_or(1.0),
        };
        let rotary_dim = (self.head_dim as f64 * partial) as usize;
        if !(partial > 0.0 && partial <= 1.0) || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            let why = format!("it rotates {rotary_dim} of {} dimensions of a head", self.head_dim);
            let advice = "the rotated part must be an even number from 2 to head_dim";
            return Err(rope.value("partial_rotary_factor", why, advice));
        }
        Ok(RopeSpec { theta, head_dim: self.head_dim, rotary_dim, scaling: self.scaling(rope)? })
    }

    fn scaling(&self, rope: &Fields<'_>) -> Result<RopeScaling, ConfigError> {
        let rope_type = match rope.opt_str("rope_type")? {
            Some(name) => name,
            None => rope.opt_str("type")?.unwrap_or("default"),
        };
        let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        let own: &[&str] = match rope_type {
            // transformers moves a top-level original length into every kind of object, so it is harmless here.
            "default" => &["original_max_position_embeddings"],
            "linear" => &["factor", "original_max_position_embeddings"],
            "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            "yarn" => &[
                "factor",
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ],
            other => {
                return Err(rope.unsupported(
                    "rope_type",
                    format!("`{other}` rotary embeddings"),
                    "supported are default, linear, llama3 and yarn",
                ));
            }
        };
        for key in rope.map.keys() {
            if !common.contains(&key.as_str()) && !own.contains(&key.as_str()) && rope.get(key).is_some() {
                return Err(rope.unsupported(
                    key,
                    format!("a change to `{rope_type}` rotary embeddings"),
                    format!("known keys are {}", [&common[..], own].concat().join(", ")),
                ));
            }
        }
        let scaling = match rope_type {
            "linear" => RopeScaling::Linear { factor: at_least_one(rope)? },
            "llama3" => RopeScaling::Llama3 {
                factor: at_least_one(rope)?,
                low_freq_factor: positive(rope, "low_freq_factor")?,
                high_freq_factor: positive(rope, "high_freq_factor")?,
                original_max_position_embeddings: self.original(rope)?,
            },
            "yarn" => RopeScaling::Yarn {
                original_max_position_embeddings: self.original(rope)?,
                factor: match rope.opt_f64("factor")? {
                    Some(_) => at_least_one(rope)?,
                    None => self.max_positions as f64 / self.original(rope)? as f64,
                },
                attention_factor: rope.opt_f64("attention_factor")?,
                // A zero counts as absent, as it does in Python's `get("beta_fast") or 32`.
                beta_fast: rope.opt_f64("beta_fast")?.filter(|beta| *beta != 0.0).unwrap_or(32.0),
                beta_slow: rope.opt_f64("beta_slow")?.filter(|beta| *beta != 0.0).unwrap_or(1.0),
                mscale: rope.opt_f64("mscale")?,
                mscale_all_dim: rope.opt_f64("mscale_all_dim")?,
                truncate: rope.opt_bool("truncate")?.unwrap_or(true),
            },
            _ => RopeScaling::Default {},
        };
        if let RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. } = scaling
            && high_freq_factor <= low_freq_factor
        {
            let why = format!("it must be above low_freq_factor = {low_freq_factor}");
            return Err(rope.value("high_freq_factor", why, "llama 3.1 has low 1 and high 4"));
        }
        Ok(scaling)
    }

    /// A top-level original length wins, then the object's own, then the model's maximum, as in transformers.
    fn original(&self, rope: &Fields<'_>) -> Result<usize, ConfigError> {
        let top = self.config.opt_count("original_max_position_embeddings")?;
        Ok(top.or(rope.opt_count("original_max_position_embeddings")?).unwrap_or(self.max_positions))
    }
}

fn at_least_one(rope: &Fields<'_>) -> Result<f64, ConfigError> {
    let factor = rope.f64("factor")?;
    if factor < 1.0 {
        return Err(rope.value("factor", "a scaling factor is at least 1", "give the factor that the model was trained with"));
    }
    Ok(factor)
}

fn positive(rope: &Fields<'_>, key: &str) -> Result<f64, ConfigError> {
    let value = rope.f64(key)?;
    if value <= 0.0 {
        return Err(rope.value(key, "it must be above 0", "give the value that the model was trained with"));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(text: &str, head_dim: usize, max_positions: usize) -> Result<(RopeSpec, Vec<String>), ConfigError> {
        let Value::Object(map) = serde_json::from_str(text).unwrap() else { panic!("not an object") };
        let mut warnings = Vec::new();
        let fields = Fields::new(Path::new("config.json"), &map);
        parse(&fields, head_dim, max_positions, &["full_attention"], &mut warnings).map(|spec| (spec, warnings))
    }

    /// Distance in units of the last place; values of either sign, no NaN.
    fn ulps(a: f32, b: f32) -> u32 {
        let ordered = |x: f32| if x.is_sign_negative() { -i64::from(x.to_bits() & 0x7fff_ffff) } else { i64::from(x.to_bits()) };
        u32::try_from((ordered(a) - ordered(b)).unsigned_abs()).unwrap()
    }

    #[test]
    fn frequencies_and_tables_match_transformers() {
        let golden: Value = serde_json::from_str(include_str!("../../../golden/data/rope.json")).unwrap();
        let floats =
            |value: &Value| -> Vec<f32> { value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect() };
        let positions: Vec<usize> =
            golden["positions"].as_array().unwrap().iter().map(|p| p.as_u64().unwrap() as usize).collect();
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() >= 15);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let head_dim = case["head_dim"].as_u64().unwrap() as usize;
            let max_positions = case["max_position_embeddings"].as_u64().unwrap() as usize;
            let config = format!(r#"{{"rope_parameters":{}}}"#, case["rope_parameters"]);
            let (spec, _) = read(&config, head_dim, max_positions).unwrap();
            assert_eq!(spec.attention_factor(), case["attention_factor"].as_f64().unwrap(), "{name}");
            let (ours, theirs) = (spec.inv_freq(), floats(&case["inv_freq"]));
            assert_eq!(ours.len(), theirs.len(), "{name}");
            for (d, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                assert!(ulps(*a, *b) <= 2, "{name} inv_freq[{d}]: {a:e} against {b:e}");
            }
            let (cos, sin) = spec.tables(positions.iter().max().unwrap() + 1);
            let half = ours.len();
            for (row, &p) in positions.iter().enumerate() {
                for (table, golden_rows) in [(&cos, &case["cos"]), (&sin, &case["sin"])] {
                    for (d, b) in floats(&golden_rows[row]).into_iter().enumerate() {
                        let a = table[p * half + d];
                        // Two units of an inverse frequency move the angle by 2^-22 of itself.
                        let bound = spec.attention_factor() as f32 * (3e-7 + p as f32 * ours[d] * 2.5e-7);
                        assert!((a - b).abs() <= bound, "{name} position {p} pair {d}: {a} against {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_two_forms_and_their_precedence() {
        let (flat, _) = read(r#"{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}"#, 8, 64).unwrap();
        assert_eq!(flat.scaling, RopeScaling::Linear { factor: 2.0 });
        assert_eq!(flat.theta, 5e5);
        let both = r#"{"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}"#;
        let (new, warnings) = read(both, 8, 64).unwrap();
        assert_eq!(new.theta, 1e6);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("overruled"));
        let (none, warnings) = read("{}", 8, 64).unwrap();
        assert_eq!((none.theta, none.rotary_dim), (DEFAULT_THETA, 8));
        assert!(warnings[0].contains("rope_theta"));
        let per_type =
            r#"{"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}"#;
        assert_eq!(read(per_type, 8, 64).unwrap().0.theta, 1e6);
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        for (text, named) in [
            (r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 2}}"#, "rope_scaling.rope_type"),
            (r#"{"rope_parameters": {"rope_type": "longrope"}}"#, "rope_parameters.rope_type"),
            (r#"{"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}"#, "rope_parameters.mrope_section"),
            (r#"{"rope_parameters": {"rope_type": "linear"}}"#, "rope_parameters.factor"),
            (r#"{"rope_parameters": {"rope_type": "linear", "factor": 0.5}}"#, "rope_parameters.factor"),
            (r#"{"rope_parameters": {"partial_rotary_factor": 0.3}}"#, "rope_parameters.partial_rotary_factor"),
            (r#"{"rope_theta": "big"}"#, "rope_theta"),
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}"#, "rope_scaling"),
        ] {
            let message = read(text, 10, 64).unwrap_err().to_string();
            assert!(message.contains(&format!("`{named}`")), "{text}: {message}");
            assert_eq!(message.lines().count(), 2, "{message}");
        }
    }

    #[test]
    fn what_is_written_reads_back_equal() {
        for text in [
            r#"{"rope_parameters": {"rope_theta": 1e6}}"#,
            r#"{"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": 0.7, "beta_fast": 20, "truncate": false}}"#,
            r#"{"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.25}}"#,
        ] {
            let (spec, _) = read(text, 16, 64).unwrap();
            let mut config = Map::new();
            config.insert("rope_parameters".to_owned(), Value::Object(spec.to_rope_parameters()));
            config.insert("rope_theta".to_owned(), spec.theta.into());
            config.insert("rope_scaling".to_owned(), Value::Object(spec.to_rope_scaling()));
            let (again, warnings) = read(&Value::Object(config).to_string(), 16, 64).unwrap();
            assert_eq!(again, spec);
            assert!(warnings.is_empty(), "{warnings:?}");
        }
    }
}
