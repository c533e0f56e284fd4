//! TensorBoard event files: scalars of steps, evaluations and GPUs.
//!
//! Refuses: everything but scalars, and every read.
//! Invariants: a file holds whole records only (a failed write is cut off again); nothing is written before `flush`.
//!
//! Framing: TensorFlow `core/lib/io/record_writer.cc` (length, masked CRC-32C of the length, data, masked CRC-32C of the data,
//! little endian). Messages: TensorFlow `core/util/event.proto` (wall_time 1, step 2, file_version 3, summary 5) and
//! `core/framework/summary.proto` (value 1; tag 1, simple_value 2).

use crate::error::TelemetryError;
use crate::event::{Envelope, Event, GpuSample, HeldOut, Step};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes one TensorBoard event file.
#[derive(Debug)]
pub struct TensorBoardWriter {
    file: File,
    path: PathBuf,
    good_len: u64,
    buffer: Vec<u8>,
    last_step: u64,
}

impl TensorBoardWriter {
    /// Makes a new file in `dir`, which is made if absent. Each launch has its own file, as TensorBoard expects.
    ///
    /// # Errors
    /// If the folder or file cannot be made.
    pub fn create(dir: &Path) -> Result<TensorBoardWriter, TelemetryError> {
        std::fs::create_dir_all(dir).map_err(TelemetryError::io("make", dir))?;
        let now_ms = crate::recorder::unix_ms();
        // TensorBoard reads the files of a folder in the order of their names, seconds first.
        let path = dir.join(format!("events.out.tfevents.{:010}.{}.{}", now_ms / 1000, std::process::id(), now_ms % 1000));
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(TelemetryError::io("open", &path))?;
        let mut writer = TensorBoardWriter { file, path, good_len: 0, buffer: Vec::new(), last_step: 0 };
        writer.buffer.extend(record(&version_event(now_ms as f64 / 1e3)));
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the scalars of an event, if it has any.
    pub fn add(&mut self, envelope: &Envelope) {
        let (step, scalars) = match &envelope.event {
            Event::Step(step) => (step.step, step_scalars(step)),
            Event::HeldOut(held_out) => (held_out.step, held_out_scalars(held_out)),
            Event::Gpu(sample) => (self.last_step, gpu_scalars(sample)),
            _ => return,
        };
        self.last_step = self.last_step.max(step);
        self.buffer.extend(record(&scalar_event(envelope.t as f64 / 1e3, step, &scalars)));
    }

    /// Writes what was added.
    ///
    /// # Errors
    /// If the file cannot be written; what was added since the last flush is then lost and the file is whole without it.
    pub fn flush(&mut self) -> Result<(), TelemetryError> {
        let written = self.file.write_all(&self.buffer);
        let len = self.buffer.len() as u64;
        self.buffer.clear();
        match written {
            Ok(()) => {
                self.good_len += len;
                Ok(())
            }
            Err(error) => {
                // Half a record would hide every later one from TensorBoard.
                let _ = self.file.set_len(self.good_len);
                Err(TelemetryError::io("write", &self.path)(error))
            }
        }
    }
}

fn tag(group: &str, variant: Option<&String>, name: &str) -> String {
    match variant {
        Some(variant) => format!("{group}/{variant}/{name}"),
        None => format!("{group}/{name}"),
    }
}

fn per_slot(out: &mut Vec<(String, f32)>, group: &str, variant: Option<&String>, values: &[f32]) {
    out.extend(values.iter().enumerate().map(|(k, &value)| (tag(group, variant, &format!("slot_{:02}", k + 1)), value)));
}

fn step_scalars(step: &Step) -> Vec<(String, f32)> {
    let variant = step.variant.as_ref();
    let mut out: Vec<(String, f32)> = [
        ("loss", step.loss),
        ("lr", step.lr),
        ("grad_norm", step.grad_norm),
        ("expected_acceptance", step.expected_acceptance),
        ("tokens_per_s", step.tokens_per_s),
        ("step_ms", step.step_ms),
        ("non_finite_skipped", step.non_finite_skipped as f64),
    ]
    .map(|(name, value)| (tag("train", variant, name), value as f32))
    .to_vec();
    out.extend(step.mfu.map(|mfu| (tag("train", variant, "mfu"), mfu as f32)));
    per_slot(&mut out, "train_accuracy", variant, &step.accuracy);
    out
}

fn held_out_scalars(held_out: &HeldOut) -> Vec<(String, f32)> {
    let variant = held_out.variant.as_ref();
    let mut out = vec![
        (tag("held_out", variant, "loss"), held_out.loss as f32),
        (tag("held_out", variant, "expected_acceptance"), held_out.expected_acceptance as f32),
    ];
    out.extend(held_out.tau.map(|tau| (tag("held_out", variant, "tau"), tau as f32)));
    per_slot(&mut out, "held_out_accuracy", variant, &held_out.accuracy);
    out
}

fn gpu_scalars(sample: &GpuSample) -> Vec<(String, f32)> {
    let group = format!("device/{}", sample.device.replace(' ', "_"));
    [
        ("utilization_percent", sample.utilization_percent),
        ("memory_used_gb", sample.memory_used_bytes as f64 / 1e9),
        ("power_w", sample.power_w),
        ("temperature_c", sample.temperature_c),
    ]
    .map(|(name, value)| (tag(&group, None, name), value as f32))
    .to_vec()
}

fn version_event(wall_time_s: f64) -> Vec<u8> {
    let mut out = Vec::new();
    put_double(&mut out, 1, wall_time_s);
    put_bytes(&mut out, 3, b"brain.Event:2");
    out
}

fn scalar_event(wall_time_s: f64, step: u64, scalars: &[(String, f32)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in scalars {
        let mut message = Vec::new();
        put_bytes(&mut message, 1, tag.as_bytes());
        put_key(&mut message, 2, 5);
        message.extend(value.to_le_bytes());
        put_bytes(&mut summary, 1, &message);
    }
    let mut out = Vec::new();
    put_double(&mut out, 1, wall_time_s);
    put_key(&mut out, 2, 0);
    put_varint(&mut out, step);
    put_bytes(&mut out, 5, &summary);
    out
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_double(out: &mut Vec<u8>, field: u64, value: f64) {
    put_key(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(data.len() + 16);
    out.extend(length);
    out.extend(masked(crc32c(&length)).to_le_bytes());
    out.extend(data);
    out.extend(masked(crc32c(data)).to_le_bytes());
    out
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected polynomial 0x82F63B78.
fn crc32c(data: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let mut crc = i as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[i] = crc;
            i += 1;
        }
        table
    };
    !data.iter().fold(!0, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ crc >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn crc32c_of_known_strings() {
        // RFC 3720, appendix B.4, and the usual check value.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn bytes_are_those_that_tensorboard_reads() {
        // Golden: read back by tensorboard 2.21's EventAccumulator as loss = 2.5 at step 300, wall time 1700000000.5.
        let bytes = record(&scalar_event(1_700_000_000.5, 300, &[("train/loss".into(), 2.5)]));
        let golden = "2100000000000000017becf6\
                      0900002040fc54d94110ac022a130a110a0a747261696e2f6c6f737315000020403cf09030";
        assert_eq!(hex(&bytes), golden);
    }

    #[test]
    fn a_failed_write_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = TensorBoardWriter::create(dir.path()).unwrap();
        writer.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = writer.flush().unwrap_err().to_string();
        assert!(error.contains("tfevents"), "{error}");
        assert!(writer.buffer.is_empty());
    }
}
