//! `cargo xtask peers`: Folio, llama.cpp and OpenVINO side by side on this machine, on the same
//! files.
//!
//! They take turns, so that a shared or throttled machine slows all; the best of all rounds counts.
//! Folio's benches measure the machine's peaks within the same minutes. Bandwidth may change within
//! seconds: for one stream's decode, Folio's share of it is the median of the rounds, each beside
//! the reads around it.

mod cost;
pub mod load;
mod measure;
mod model;
mod plot;
mod question;
mod record;
mod scale;
mod serve;
mod setup;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{prepare, process};
use cost::Ceilings;
use load::Watch;
use measure::Engines;
use model::{Model, Workshop};
use question::{Engine, Question};
use record::{Record, Records};
use setup::LlamaCpp;

const HELP: &str = "\
cargo xtask peers [--questions decode,prefill,...] [--models 1b] [--formats bf16,q8_0,q4_0] [--rounds 3] [--threads 2]
                  [--engines folio,llama.cpp,openvino] [--repeats 2] [--requests 64] [--rate REQUESTS_A_SECOND]
                  [--models-folder FOLDER] [--cache FOLDER] [--binary FOLIO] [--write]

Sets up llama.cpp's tools and OpenVINO GenAI and writes the models as GGUF in target/xtask or --cache, then measures all in
turns. Models: 42m and moe (trained, from --models-folder), 1b and 3b (random; 3b takes 12 GB). Formats: bf16 and those of
llama-quantize. Questions, all by default:

  decode    one stream behind 0 and 1,024 tokens
  prefill   prompts of 128, 512 and 2,048 tokens
  streams   1 to 64 streams that decode together
  http      through the HTTP servers, 16 requests at a time
  load      the same as requests come: at --rate, else at 60% of what http found for the slower server
  start     process start to first token
  memory    most memory resident
  context   Folio alone behind 0 to 8,000 tokens, as far as the model goes
  kv        Folio alone behind 3,500 tokens, keys and values in bf16 and int8

In each of --rounds all take their turn, with --repeats of what no server is asked. Figures are kept, so that this may be
done in pieces; --write puts all of them into docs/benchmarks.md and the plots into docs/benchmarks, and with --questions
none does nothing else. Without --binary Folio's release binary is built first.";

#[derive(Debug, PartialEq)]
struct Options {
    questions: Vec<Question>,
    models: Vec<&'static str>,
    formats: Vec<String>,
    engines: Vec<Engine>,
    rounds: usize,
    repeats: usize,
    requests: usize,
    threads: usize,
    rate: Option<f64>,
    models_folder: Option<PathBuf>,
    cache: Option<PathBuf>,
    binary: Option<PathBuf>,
    writes: bool,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self> {
        let mut options = Self {
            questions: Question::ALL.to_vec(),
            models: vec!["1b"],
            formats: ["bf16", "q8_0", "q4_0"].map(str::to_owned).to_vec(),
            engines: Engine::ALL.to_vec(),
            rounds: 3,
            repeats: 2,
            requests: 64,
            threads: 2,
            rate: None,
            models_folder: None,
            cache: None,
            binary: None,
            writes: false,
        };
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            if flag == "--write" {
                options.writes = true;
                continue;
            }
            let value = args.next().with_context(|| format!("{flag} needs a value\n\n{HELP}"))?;
            let number = || match value.parse::<usize>() {
                Ok(number) if number > 0 => Ok(number),
                _ => bail!("{flag} is {value}, but must be a number from 1 on"),
            };
            let path = || Ok::<_, std::io::Error>(Some(std::path::absolute(value)?));
            match flag.as_str() {
                "--questions" if value == "none" => options.questions.clear(),
                "--questions" => options.questions = several(flag, value, &Question::ALL, Question::name)?,
                "--engines" => options.engines = several(flag, value, &Engine::ALL, Engine::name)?,
                "--models" => options.models = several(flag, value, &model::NAMES, |name| name)?,
                "--formats" => {
                    options.formats = value.split(',').map(str::to_lowercase).collect();
                    // The names become part of file names.
                    let is_word = value.chars().all(|c| c.is_ascii_alphanumeric() || "_,".contains(c));
                    ensure!(is_word, "{flag} is {value}, but must be names separated by commas");
                }
                "--rounds" => options.rounds = number()?,
                "--repeats" => options.repeats = number()?,
                "--requests" => options.requests = number()?,
                "--threads" => options.threads = number()?,
                "--rate" => {
                    options.rate = value.parse().ok().filter(|rate: &f64| *rate > 0.0);
                    ensure!(options.rate.is_some(), "{flag} is {value}, but must be a number above 0");
                }
                "--models-folder" => options.models_folder = path()?,
                "--cache" => options.cache = path()?,
                "--binary" => options.binary = path()?,
                _ => bail!("there is no flag {flag}\n\n{HELP}"),
            }
        }
        Ok(options)
    }
}

/// The members of `all` that a comma-separated list names.
fn several<T: Copy>(flag: &str, value: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<Vec<T>> {
    let find = |part: &str| {
        let known: Vec<&str> = all.iter().map(|one| name(*one)).collect();
        let found = all.iter().find(|one| name(**one).eq_ignore_ascii_case(part)).copied();
        found.with_context(|| format!("{flag}: there is no {part}, but {}", known.join(", ")))
    };
    value.split(',').map(find).collect()
}

pub fn run(args: &[String]) -> Result<()> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let options = Options::parse(args)?;
    let home = options.cache.clone().unwrap_or_else(prepare::cache);
    let folder = home.join("peers");
    std::fs::create_dir_all(&folder)?;
    let mut records = Records::open(folder.join("results.json"))?;
    if !options.questions.is_empty() {
        let llama_cpp = LlamaCpp::under(&home);
        // llama.cpp makes all files but those in bf16, even if it is not measured.
        if options.engines != [Engine::Folio] || options.formats.iter().any(|format| format != "bf16") {
            llama_cpp.prepare(&home)?;
        }
        let openvino = options.engines.contains(&Engine::OpenVino).then(|| setup::openvino(&home)).transpose()?;
        let folio = options.binary.clone().map_or_else(|| process::folio(&process::root(), None), Ok)?;
        let trained = options.models_folder.as_deref();
        let quantize = &llama_cpp.quantize;
        let workshop = Workshop { folder: &folder, trained, folio: &folio, quantize, for_openvino: openvino.is_some() };
        let files = options.models.iter().flat_map(|name| options.formats.iter().map(move |format| (name, format)));
        let models: Vec<Model> = files.map(|(name, format)| workshop.prepare(name, format)).collect::<Result<_>>()?;
        let Options { threads, repeats, requests, .. } = options;
        let (ceilings, pairs) = (Ceilings::none(), Vec::new());
        let mut engines = Engines { folio, llama_cpp, openvino, threads, repeats, requests, ceilings, pairs, folder };
        side_by_side(&options, &mut engines, &models, &mut records)?;
    }
    if options.writes { records.write(&process::root().join("docs")) } else { Ok(()) }
}

/// Place, time and conditions of a measurement.
fn about(options: &Options, found: &Ceilings, watch: &Watch) -> Result<String> {
    let mut text = record::place_and_time()?;
    text += &format!(", {} threads, best of {}", options.threads, options.rounds);
    if found.read_bytes_per_s > 0.0 {
        let found =
            [found.read_bytes_per_s, found.read_lowest, found.bf16_flops, found.int8_ops].map(|rate| rate / 1e9);
        let [read, lowest, bf16, int8] = found;
        text += &format!(". Read {read:.1} GB/s (lowest {lowest:.1}), bf16 {bf16:.0} GFLOP/s, int8 {int8:.0} GOP/s");
    }
    Ok(text + &format!("; others had {} of the CPU.", percent(watch.others())))
}

/// One question about one model.
struct Case<'a> {
    question: Question,
    model: &'a Model,
    /// Requests a second of an open loop.
    rate: Option<f64>,
    /// Engines that have not failed yet.
    engines: Vec<Engine>,
    record: Record,
}

impl Case<'_> {
    fn so_far(&self, about: &str, ceilings: &Ceilings) -> Record {
        let bound = |size: &usize| self.model.cost.bound(self.question, *size, ceilings);
        let bounds: Vec<_> = self.question.sizes().iter().map(bound).collect();
        self.record.described(about, self.rate, &bounds, self.model.cost.parameters())
    }

    /// Measures all engines, with another first one each round. An engine that fails is left out
    /// from then on.
    fn round(&mut self, round: usize, engines: &mut Engines) -> Result<()> {
        let what = format!("round {} {} {}", round + 1, self.question.name(), self.record.label());
        for engine in turns(&self.engines, round) {
            let watch = Watch::start();
            match engines.ask(engine, self.question, self.model, self.rate) {
                Ok(figures) => {
                    self.record.put(round, engine, &figures);
                    let of_read = self.model.cost.of_read(self.question, &engines.pairs);
                    self.record.put_of_read(round, &of_read);
                    let figures: Vec<String> = figures.iter().map(|figure| format!("{figure:.2}")).collect();
                    let others = percent(watch.others());
                    eprintln!("{what}: {} {}; others {others}", engine.name(), figures.join(" "));
                }
                Err(error) if engine == Engine::Folio => return Err(error.context(what)),
                Err(error) => {
                    eprintln!("{what}: {} is left out: {error:#}", engine.name());
                    self.engines.retain(|other| *other != engine);
                }
            }
        }
        Ok(())
    }
}

pub fn turns<T: Copy>(all: &[T], round: usize) -> Vec<T> {
    let mut turns = all.to_vec();
    turns.rotate_left(round % all.len().max(1));
    turns
}

fn side_by_side(options: &Options, engines: &mut Engines, models: &[Model], records: &mut Records) -> Result<()> {
    let watch = Watch::start();
    let questions = options.questions.iter().flat_map(|question| models.iter().map(move |model| (*question, model)));
    let case = |(question, model)| Case {
        question,
        model,
        rate: options.rate.filter(|_| question == Question::Load),
        engines: options.engines.clone(),
        record: Record::new(question, &model.name, &model.format),
    };
    let mut cases: Vec<Case> = questions.map(case).collect();
    for round in 0..options.rounds {
        for case in &mut cases {
            if case.question == Question::Load && case.rate.is_none() {
                let http = records.find(Question::Http, case.model);
                let rate = |engine| http.and_then(|http| http.best(engine, Question::Http, 0));
                case.rate = serve::open_loop_rate(Engine::ALL.into_iter().filter_map(rate));
                ensure!(case.rate.is_some(), "load needs --rate, or an answer to http for the same model and format");
            }
            case.round(round, engines)?;
            records.keep(&[case.so_far(&about(options, &engines.ceilings, &watch)?, &engines.ceilings)])?;
        }
    }
    // All records get the peaks and the minutes of the whole run.
    let about = about(options, &engines.ceilings, &watch)?;
    let new: Vec<Record> = cases.iter().map(|case| case.so_far(&about, &engines.ceilings)).collect();
    records.keep(&new)?;
    for question in &options.questions {
        let of_question: Vec<&Record> = new.iter().filter(|record| record.is_of(*question)).collect();
        println!("{}", record::table(*question, &of_question));
    }
    Ok(())
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("found no {name} in what was printed"))
}

pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "an unknown part".into(), |share| format!("{:.0}%", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options> {
        Options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags() {
        let options =
            parse("--rounds 5 --requests 32 --formats Q4_0,q4_k_m --questions load,Decode --engines folio,openvino")
                .unwrap();
        assert_eq!((options.rounds, options.repeats, options.requests), (5, 2, 32));
        assert_eq!(options.formats, ["q4_0", "q4_k_m"]);
        assert_eq!(options.questions, [Question::Load, Question::Decode]);
        assert_eq!(options.engines, [Engine::Folio, Engine::OpenVino]);
        let options = parse("--write --questions none --models moe,42m").unwrap();
        assert!(options.writes && options.questions.is_empty());
        assert_eq!(options.models, ["moe", "42m"]);
        assert_eq!(parse("").unwrap().formats, ["bf16", "q8_0", "q4_0"]);
        for wrong in
            ["--rounds", "--rounds 0", "--formats ../x", "--fast 1", "--models 7b", "--questions decode,", "--rate 0"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn all_take_turns_to_begin() {
        assert_eq!([0, 1, 2, 3].map(|round| turns(&["a", "b", "c"], round).concat()), ["abc", "bca", "cab", "abc"]);
    }
}
