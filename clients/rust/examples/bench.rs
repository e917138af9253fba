//! The bench of clients/conformance/BENCH.md: one JSON object on standard output.

use std::error::Error;
use std::fs::{self, File};
use std::io::Read;
use std::time::Instant;

use hearth_client::{Client, Encoding, Generate, Image, Message, Options};
use serde_json::json;

type Fault = Box<dyn Error>;

const SIDE: u32 = 512;
const SESSIONS: usize = 32;

fn main() -> Result<(), Fault> {
    let address = std::env::args().nth(1).ok_or("no address")?;
    let open = || -> Result<Client, Fault> {
        let client = Options::new().address(&*address).connect()?;
        client.status().wait()?;
        Ok(client)
    };
    let client = open()?;
    let before = resident_kb()?;
    let more = (0..SESSIONS).map(|_| open());
    let more = more.collect::<Result<Vec<_>, _>>()?;
    let session_kb = (resident_kb()? - before) / SESSIONS as f64;
    drop(more);
    let status_s = median(200, || timed(|| Ok(client.status().wait()?)))?;
    let delta_s = median(20, || {
        let mut deltas = 0;
        let seconds = timed(|| {
            let request = Generate::prompt("Once upon a time");
            for delta in &mut client.generate(request.max_tokens(256).ignore_eos(true)) {
                delta?;
                deltas += 1;
            }
            Ok(())
        })?;
        Ok(seconds / f64::from(deltas))
    })?;
    let image_s = median(10, || {
        let mut seed = [0; 64];
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
        let pixels = seed.repeat((4 * SIDE * SIDE / 64) as usize);
        timed(|| {
            let image = Image::raw(Encoding::Rgba8, SIDE, SIDE, pixels);
            let turns = [Message::user([image.into()])];
            let reply = client.generate(Generate::chat(turns).max_tokens(1));
            reply.wait()?;
            Ok(())
        })
    })?;
    let figures = json!({
        "status_us": 1e6 * status_s,
        "delta_us": 1e6 * delta_s,
        "image_ms": 1e3 * image_s,
        "rss_kb": session_kb,
    });
    println!("{figures}");
    Ok(())
}

fn timed<T>(task: impl FnOnce() -> Result<T, Fault>) -> Result<f64, Fault> {
    let began = Instant::now();
    task()?;
    Ok(began.elapsed().as_secs_f64())
}

fn median(count: usize, mut task: impl FnMut() -> Result<f64, Fault>) -> Result<f64, Fault> {
    for _ in 0..count / 10 + 1 {
        task()?;
    }
    let mut all = (0..count).map(|_| task()).collect::<Result<Vec<_>, _>>()?;
    all.sort_by(f64::total_cmp);
    Ok((all[(count - 1) / 2] + all[count / 2]) / 2.0)
}

fn resident_kb() -> Result<f64, Fault> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.ok_or("no VmRSS")?.parse()?)
}
