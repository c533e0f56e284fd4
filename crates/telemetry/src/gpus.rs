//! Readings of the machine's NVIDIA GPUs, by the tool that comes with their driver.
//!
//! Refuses: to link or load a driver library, to call a GPU well that it could not read, and to hold anyone up (one thread, one child process).
//! Invariants: a machine without `nvidia-smi` gives no readings, which is said once by the caller; the child ends with the [`GpuWatch`].

use crate::event::{Event, GpuSample};
use crate::recorder::Recorder;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

const FIELDS: &str = "--query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu";
const FORMAT: &str = "--format=csv,noheader,nounits";
/// Between two readings.
const EVERY_MS: &str = "2000";

/// Reads every GPU once; empty where there is no `nvidia-smi`.
pub fn read_gpus() -> Vec<GpuSample> {
    let output = Command::new("nvidia-smi").args([FIELDS, FORMAT]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    output.map(|o| parse_gpus(&String::from_utf8_lossy(&o.stdout))).unwrap_or_default()
}

/// The readings in `nvidia-smi`'s comma-separated lines (index, name, utilisation in %, memory used and total in MiB, power in W,
/// temperature in °C). Lines that are not such readings are passed over: the tool mixes in warnings.
pub fn parse_gpus(text: &str) -> Vec<GpuSample> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<GpuSample> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let [index, name, utilization, used, total, power, temperature] = cells[..] else { return None };
    // What a model does not measure reads `[N/A]`.
    let number = |cell: &str| cell.parse::<f64>().unwrap_or(f64::NAN);
    let bytes = |cell: &str| cell.parse::<u64>().ok().map(|mib| mib << 20);
    Some(GpuSample {
        device: format!("gpu {}", index.parse::<u32>().ok()?),
        name: name.to_owned(),
        utilization_percent: number(utilization),
        memory_used_bytes: bytes(used)?,
        memory_total_bytes: bytes(total)?,
        power_w: number(power),
        temperature_c: number(temperature),
    })
}

/// Records a reading of every GPU every two seconds until it is dropped.
#[derive(Debug)]
pub struct GpuWatch {
    child: Child,
    thread: Option<JoinHandle<()>>,
}

impl GpuWatch {
    /// Starts; `None` where there is no `nvidia-smi` or no thread to read it.
    pub fn start(recorder: Recorder) -> Option<GpuWatch> {
        let mut child = Command::new("nvidia-smi")
            .args([FIELDS, FORMAT, "-lms", EVERY_MS])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let lines = BufReader::new(child.stdout.take()?).lines();
        let read = move || {
            for line in lines.map_while(Result::ok) {
                parse_gpus(&line).into_iter().for_each(|sample| recorder.record(Event::Gpu(sample)));
            }
        };
        match std::thread::Builder::new().name("telemetry-gpus".into()).spawn(read) {
            Ok(thread) => Some(GpuWatch { child, thread: Some(thread) }),
            Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                None
            }
        }
    }
}

impl Drop for GpuWatch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_readings_and_other_lines_do_not() {
        let text = "WARNING: infoROM is corrupted at gpu 0000:1A\n0, NVIDIA H200, 97, 1024, 143771, 512.25, 61\n\
                    3, NVIDIA A2, [N/A], 5, 15356, [N/A], 40\n";
        let gpus = parse_gpus(text);
        assert_eq!(gpus.len(), 2);
        assert_eq!((gpus[0].device.as_str(), gpus[0].memory_used_bytes, gpus[0].power_w), ("gpu 0", 1 << 30, 512.25));
        assert_eq!((gpus[1].device.as_str(), gpus[1].memory_total_bytes), ("gpu 3", 15_356 << 20));
        assert!(gpus[1].utilization_percent.is_nan() && gpus[1].power_w.is_nan());
    }
}
