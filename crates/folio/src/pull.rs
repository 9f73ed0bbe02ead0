//! `folio pull`: flags and the environment become options of `folio-hub`.

use anyhow::{Context, Result, bail};
use folio_hub::{Kind, Listener, Options, Pulled};
use folio_session::HubName;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::PullArgs;
use crate::environment;

pub fn main(args: &PullArgs) -> Result<()> {
    let Some(name) = HubName::parse(&args.model) else {
        bail!(
            "expected ORG/NAME, ORG/NAME:QUANTIZATION or ORG/NAME/FILE.gguf, with an optional @REVISION, found {:?}",
            args.model
        );
    };
    if environment::is_offline() {
        bail!("offline mode is on (HF_HUB_OFFLINE): nothing is downloaded; unset it and try again");
    }
    let options = Options {
        cache: environment::hub_cache().context("neither HF_HOME nor a home folder is set")?,
        token: environment::hub_token(),
        endpoint: environment::hub_endpoint(),
        all: args.all,
    };
    let Pulled { path, kind } = folio_hub::pull(&name, &options, &mut Bar(ProgressBar::hidden()))?;
    outln!("{}", path.display())?;
    match kind {
        Kind::Model => outln!("try: folio run {}", name.with(&name.pick)),
        Kind::Adapter => outln!("this is a LoRA adapter, which folio does not load"),
        Kind::Weights => outln!("there is no config.json, without which folio cannot load a model"),
    }
}

/// A bar for each file.
struct Bar(ProgressBar);

impl Listener for Bar {
    fn chose(&mut self, chosen: &str, others: &[String]) {
        say!("downloading {chosen}, one of {} models; the others: {}", others.len() + 1, others.join(", "));
    }

    fn begin(&mut self, file: &str, bytes: usize) {
        let style = "{msg:28!} {bar:28} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>12} {eta:>5}";
        let style = ProgressStyle::with_template(style).expect("the template is well formed");
        self.0 = ProgressBar::new(bytes as u64).with_style(style).with_message(file.to_owned());
    }

    fn advance(&mut self, bytes: usize) {
        self.0.inc(bytes as u64);
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}
