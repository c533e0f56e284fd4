//! Floats in JSON: numbers when finite, else one of three strings that `Number()` of JavaScript and `float()` of Python read.
//!
//! Refuses any other spelling. Invariant: a value that is not finite survives the journey through JSON, which has no such numbers.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

#[derive(Deserialize)]
#[serde(untagged)]
enum Either {
    Number(f64),
    Text(String),
}

fn text_of(value: f64) -> &'static str {
    if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "Infinity"
    } else {
        "-Infinity"
    }
}

fn value_of<E: Error>(either: Either) -> Result<f64, E> {
    match either {
        Either::Number(value) => Ok(value),
        Either::Text(text) => match text.as_str() {
            "NaN" => Ok(f64::NAN),
            "Infinity" => Ok(f64::INFINITY),
            "-Infinity" => Ok(f64::NEG_INFINITY),
            other => Err(E::custom(format!("`{other}` is not a number"))),
        },
    }
}

pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { serializer.serialize_f64(*value) } else { serializer.serialize_str(text_of(*value)) }
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    value_of(Either::deserialize(deserializer)?)
}

/// Lists of floats, by the same rule.
pub mod list {
    use super::{Either, text_of, value_of};
    use serde::{Deserialize, Deserializer, Serializer, ser::SerializeSeq};

    pub fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(values.len()))?;
        for value in values {
            if value.is_finite() {
                seq.serialize_element(value)?;
            } else {
                seq.serialize_element(text_of(f64::from(*value)))?;
            }
        }
        seq.end()
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        Vec::<Either>::deserialize(deserializer)?.into_iter().map(|either| value_of(either).map(|value| value as f32)).collect()
    }
}
