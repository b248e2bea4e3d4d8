//! The command line: what a user types, to what the other modules do.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use spec::suggest;
use stage::Exit;

use crate::error::{Error, Result};
use crate::selection::{Request, Selection};
use crate::sql::Question;
use crate::workspace::{Options, Workspace, cache_folder};
use crate::{bench, clock, collect, execute, plan, report, show, sql, status, transfer, verify, why};
use store::Cache;

const EXAMPLES: &str = "\
Examples:
  pipeline plan recipes/tarot.toml                    what would run, and why
  pipeline run recipes/tarot.toml                     run what is not cached
  pipeline run recipes/tarot.toml --device cuda       on a GPU
  pipeline run recipes/tarot.toml --ranks 2           train as two processes, to the same numbers
  pipeline run recipes/tarot.toml --ranks 8 --max-restarts 3 --min-ranks 4
  pipeline run recipes/tarot.toml --set train.step_scheduler.max_steps=20
  pipeline run recipes/tarot.toml --from train        leave what comes before as it is
  pipeline run recipes/tarot.toml --force generate    run it although it is cached
  pipeline sql recipes/tarot.toml \"select reason, count(*) from rejects group by 1\"
  pipeline show recipes/tarot.toml train              the artifact, its key, its files
  pipeline report recipes/tarot.toml --open           the last run as a page
  pipeline run recipes/tarot.toml --remote s3://team/cache    share results with others
  pipeline ingest recipes/tarot.toml --dump seen/     one stage on its own; see what the model sees

`pipeline STAGE RECIPE` runs one stage of the graph (pipeline.toml); further `--name value` set its parameters.
Results lie in runs/RECIPE/STAGE, links into the cache (.pipeline, --cache DIR or PIPELINE_CACHE).
An interrupted run goes on with the same command.
";

/// Fine-tune image diffusion models from one recipe: stages as programs, cached, each answerable.
#[derive(Debug, Parser)]
#[command(name = "pipeline", version, max_term_width = 110, after_help = after_help(), disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every stage of a recipe whose result is not cached
    Run(RunArgs),
    /// Run a recipe, then hold its numbers against the bounds of its `[bench]` tables
    Bench(RunArgs),
    /// Say what would run, and why
    Plan(RunArgs),
    /// Ask the tables of a recipe's artifacts in SQL
    Sql(SqlArgs),
    /// Show the current artifacts of a recipe, or of one of its stages in full
    Show(ShowArgs),
    /// Say why a stage runs or does not, or what became of a sample
    Explain(ExplainArgs),
    /// Show where each stage stands, and the recipe's runs
    Status(StatusArgs),
    /// Read every file of a recipe's artifacts again, or of the whole cache
    Verify(VerifyArgs),
    /// Send a recipe's artifacts to a remote that others share
    Push(PushArgs),
    /// Bring a recipe's artifacts from a remote, and run nothing
    Pull(PullArgs),
    /// Free the space of artifacts that no kept run reaches
    Gc(GcArgs),
    /// Write the page of the last run: curves, pictures, what was refused, exact versions
    Report(ReportArgs),
    #[command(external_subcommand)]
    Stage(Vec<OsString>),
}

#[derive(Debug, Args)]
struct Common {
    /// Recipe: a TOML file with a table for each stage
    recipe: PathBuf,
    /// Override one value of the recipe; may be repeated
    #[arg(long, value_name = "STAGE.KEY=VALUE")]
    set: Vec<String>,
    /// Cache folder [default: $PIPELINE_CACHE or .pipeline]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Folder of the links to results [default: runs]
    #[arg(long, value_name = "DIR")]
    runs: Option<PathBuf>,
    /// Ask the Hub again which commit a revision means
    #[arg(long)]
    update: bool,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Resources {
    /// cpu, cuda or cuda:N [default: the recipe's, else cpu]
    #[arg(long)]
    device: Option<String>,
    /// CPU threads of a stage, all its ranks together [default: the recipe's, else all cores, shared by stages that run at the same time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    threads: Option<u32>,
    /// Stages that run at the same time at most [default: as many as threads and devices allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Processes that share the work of a stage which can [default: the recipe's, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    resources: Resources,
    /// Start a stage that saves its work (train) again from its last save, up to N times, when it crashes, loses a rank or fails
    /// for no reason that would come again
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,
    /// When a restart comes no further than the try before, go on with fewer ranks, down to N [default: as many as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "max_restarts")]
    min_ranks: Option<u32>,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Run nothing before these stages; what they need must be cached
    #[arg(long, value_name = "STAGE", value_delimiter = ',')]
    from: Vec<String>,
    /// Run nothing after these stages
    #[arg(long, value_name = "STAGE", value_delimiter = ',')]
    until: Vec<String>,
    /// Run only these stages; what they need must be cached
    #[arg(long, value_name = "STAGE", value_delimiter = ',', conflicts_with_all = ["from", "until"])]
    only: Vec<String>,
    /// Run these stages (or all that are selected) although they are cached; what follows runs if their result differs
    #[arg(long, value_name = "STAGE", value_delimiter = ',', num_args = 0..)]
    force: Option<Vec<String>>,
    /// Read every cached file again, and rebuild what is damaged, however long that takes
    #[arg(long)]
    repair: bool,
}

#[derive(Debug, Args)]
struct SqlArgs {
    #[command(flatten)]
    common: Common,
    /// SELECT statement, or `\\d` for the tables; without one, a prompt, or a script from standard input
    query: Option<String>,
    /// table, csv, json (an array of objects), jsonl (an object a line) or parquet [default: by the ending of --output,
    /// else table]
    #[arg(long)]
    format: Option<String>,
    /// Write the answer to this file
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    common: Common,
    /// Show this stage in full
    stage: Option<String>,
}

#[derive(Debug, Args)]
struct ExplainArgs {
    #[command(flatten)]
    common: Common,
    /// A stage; or a sample, by its id or its source
    #[arg(value_name = "STAGE|SAMPLE")]
    subject: String,
}

#[derive(Debug, Args)]
struct StatusArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct VerifyArgs {
    /// Recipe; without one, all artifacts of the cache are read
    recipe: Option<PathBuf>,
    /// Cache folder [default: $PIPELINE_CACHE or .pipeline]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct RemoteArgs {
    /// Store that others share: file:///…, s3://…, gs://… or az://… [default: $PIPELINE_REMOTE]
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
}

#[derive(Debug, Args)]
struct PushArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Send what the remote has, too, over what lies there
    #[arg(long)]
    repair: bool,
}

#[derive(Debug, Args)]
struct PullArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    remote: RemoteArgs,
}

#[derive(Debug, Args)]
struct GcArgs {
    /// Cache folder [default: $PIPELINE_CACHE or .pipeline]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Newest runs of each stage of each recipe whose artifacts are kept
    #[arg(long, value_name = "N", default_value_t = 1)]
    keep_runs: usize,
    /// Remove only what was not used for this long, such as 30d or 12h
    #[arg(long, value_name = "AGE", value_parser = clock::duration)]
    older_than: Option<std::time::Duration>,
    /// Remove only until the cache takes no more than this, such as 200GB; what is longest unused goes first
    #[arg(long, value_name = "SIZE", value_parser = clock::bytes)]
    max_size: Option<u64>,
    /// Say what would go, and remove nothing
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ReportArgs {
    #[command(flatten)]
    common: Common,
    /// Write it here [default: runs/RECIPE/report.html]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Open it in the browser
    #[arg(long)]
    open: bool,
}

/// `pipeline STAGE RECIPE`.
#[derive(Debug, Parser)]
#[command(about = "Run one stage of a recipe on its own; what it needs must be cached", max_term_width = 110)]
struct StageArgs {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    resources: Resources,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Run the stage although it is cached
    #[arg(long)]
    force: bool,
    /// Write what the stage saw to this folder, for people (ingest: one PNG a sample)
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
}

fn after_help() -> String {
    let codes: Vec<String> = Exit::TABLE.iter().map(|(exit, text)| format!("  {:3}  {text}", exit.code())).collect();
    format!("{EXAMPLES}\nExit codes:\n{}", codes.join("\n"))
}

/// `main` of the program.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let json = args.iter().any(|arg| arg == "--json");
    let result = match Cli::try_parse_from(&args) {
        Ok(cli) => dispatch(cli.command),
        Err(error) => return clap_exit(&error),
    };
    match result {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            error.print(json);
            error.exit.into()
        }
    }
}

fn clap_exit(error: &clap::Error) -> ExitCode {
    // A closed pipe is no reason to complain.
    let _ = error.print();
    if error.use_stderr() { Exit::Usage.into() } else { Exit::Ok.into() }
}

fn dispatch(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => {
            let (workspace, selection, json) = open_run(args)?;
            execute::run(&workspace, &selection, json)
        }
        Command::Bench(args) => {
            let (workspace, selection, json) = open_run(args)?;
            bench::run(&workspace, &selection, json)
        }
        Command::Plan(args) => {
            let (workspace, selection, json) = open_run(args)?;
            plan::print(&workspace, &selection, json)
        }
        Command::Sql(args) => {
            let format = args.format.as_deref().or(args.common.json.then_some("jsonl"));
            let workspace = Workspace::open(options(&args.common, None))?;
            sql::print(&workspace, &Question { query: args.query.as_deref(), format, output: args.output.as_deref() })
        }
        Command::Show(args) => {
            let workspace = Workspace::open(options(&args.common, None))?;
            show::print(&workspace, args.stage.as_deref(), args.common.json)
        }
        Command::Explain(ExplainArgs { common, subject }) => {
            why::print(&Workspace::open(options(&common, None))?, &subject, common.json)
        }
        Command::Status(StatusArgs { common }) => status::print(&Workspace::open(options(&common, None))?, common.json),
        Command::Verify(VerifyArgs { recipe: None, cache, json }) => {
            verify::cache(&Cache::open(&cache_folder(cache.as_deref()))?.hold(), json)
        }
        Command::Verify(VerifyArgs { recipe: Some(recipe), cache, json }) => {
            verify::recipe(&Workspace::open(Options { recipe, cache, ..Options::default() })?, json)
        }
        Command::Push(PushArgs { common, remote, repair }) => {
            let address = transfer::needed(remote.remote)?;
            transfer::to(&Workspace::open(options(&common, None))?, &address, repair, common.json)
        }
        Command::Pull(PullArgs { common, remote }) => {
            let remote = Some(transfer::needed(remote.remote)?);
            transfer::from(&Workspace::open(Options { remote, ..options(&common, None) })?, common.json)
        }
        Command::Gc(GcArgs { cache, keep_runs, older_than, max_size, dry_run, json }) => {
            let request = collect::Request { keep_runs, older_than, max_size, dry_run };
            collect::print(&cache_folder(cache.as_deref()), &request, json)
        }
        Command::Report(args) => {
            let workspace = Workspace::open(options(&args.common, None))?;
            report::print(&workspace, args.output.as_deref(), args.open, args.common.json)
        }
        Command::Stage(args) => one_stage(&args),
    }
}

fn options(common: &Common, resources: Option<&Resources>) -> Options {
    Options {
        recipe: common.recipe.clone(),
        overrides: common.set.clone(),
        cache: common.cache.clone(),
        runs: common.runs.clone(),
        device: resources.and_then(|resources| resources.device.clone()),
        threads: resources.and_then(|resources| resources.threads).map(|threads| threads as usize),
        jobs: resources.and_then(|resources| resources.jobs).map(|jobs| jobs as usize),
        ranks: resources.and_then(|resources| resources.ranks).map(|ranks| ranks as usize),
        max_restarts: 0,
        min_ranks: None,
        update: common.update,
        remote: None,
        repair: false,
    }
}

fn open_run(args: RunArgs) -> Result<(Workspace, Selection, bool)> {
    let remote = transfer::address(args.remote.remote);
    let options = Options {
        repair: args.repair,
        remote,
        max_restarts: args.max_restarts as usize,
        min_ranks: args.min_ranks.map(|ranks| ranks as usize),
        ..options(&args.common, Some(&args.resources))
    };
    let workspace = Workspace::open(options)?;
    let request = Request {
        from: args.from,
        until: args.until,
        only: args.only,
        force_all: args.force.as_ref().is_some_and(Vec::is_empty),
        force: args.force.unwrap_or_default(),
    };
    let selection = Selection::new(&workspace.graph, &workspace.recipe, &request)?;
    Ok((workspace, selection, args.common.json))
}

/// `pipeline STAGE RECIPE [--dump DIR] [--parameter value…]`.
fn one_stage(args: &[OsString]) -> Result<()> {
    let mut args = args.iter().map(|arg| arg.to_string_lossy().into_owned());
    let verb = args.next().unwrap_or_default();
    let (known, mut overrides) = split_parameters(&verb, args.collect())?;
    let program = format!("pipeline {verb}");
    let parsed = match StageArgs::try_parse_from(std::iter::once(program).chain(known)) {
        Ok(parsed) => parsed,
        // Without a recipe the verb itself is more likely the slip.
        Err(error) if error.use_stderr() && suggest::nearest(&verb, OWN_COMMANDS.iter().copied()).is_some() => {
            return Err(unknown_command(&verb, OWN_COMMANDS.iter().copied()));
        }
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() {
                Err(Error { exit: Exit::Usage, mistakes: Vec::new(), log_tail: None })
            } else {
                Ok(())
            };
        }
    };
    if let Some(folder) = &parsed.dump {
        // Typed in a shell, so it starts at the current folder, not at the recipe's.
        let folder = std::path::absolute(folder)?;
        overrides.push(format!("{verb}.dump={}", serde_json::Value::from(folder.to_string_lossy().as_ref())));
    }
    let mut options = options(&parsed.common, Some(&parsed.resources));
    options.overrides.append(&mut overrides);
    options.remote = transfer::address(parsed.remote.remote.clone());
    let plain = options.clone();
    let workspace = Workspace::open(options).or_else(|error| {
        // With `plna.key=…` as an override the recipe is refused; the command is what is wrong.
        let opened = Workspace::open(Options { overrides: parsed.common.set.clone(), ..plain })?;
        if opened.graph.node(&verb).is_none() { Ok(opened) } else { Err(error) }
    })?;
    if workspace.graph.node(&verb).is_none() {
        let stages = workspace.graph.nodes().map(|node| node.name.as_str());
        return Err(unknown_command(&verb, OWN_COMMANDS.iter().copied().chain(stages)));
    }
    let forced = parsed.force || parsed.dump.is_some();
    let request =
        Request { only: vec![verb.clone()], force: if forced { vec![verb] } else { Vec::new() }, ..Request::default() };
    let selection = Selection::new(&workspace.graph, &workspace.recipe, &request)?;
    execute::run(&workspace, &selection, parsed.common.json)
}

const OWN_COMMANDS: &[&str] =
    &["run", "plan", "sql", "show", "report", "explain", "status", "verify", "push", "pull", "gc"];

fn unknown_command<'a>(verb: &str, known: impl Iterator<Item = &'a str> + Clone) -> Error {
    Error::usage(format!("`{verb}` is neither a command nor a stage"), suggest::help(verb, known))
}

/// Takes `--name value` and `--name=value` that are no options of the runner for parameters of the stage.
fn split_parameters(verb: &str, args: Vec<String>) -> Result<(Vec<String>, Vec<String>)> {
    let command = StageArgs::command();
    let own: Vec<String> = command
        .get_arguments()
        .flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default())
        .map(str::to_owned)
        .chain(["help".to_owned()])
        .collect();
    let (mut known, mut overrides) = (Vec::new(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let Some(option) = arg.strip_prefix("--").filter(|option| !option.is_empty()) else {
            known.push(arg);
            continue;
        };
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (option, None),
        };
        if own.iter().any(|own| own == name) {
            known.push(arg);
            continue;
        }
        let value = value.or_else(|| args.next_if(|next| !next.starts_with("--"))).ok_or_else(|| {
            Error::usage(format!("`--{name}` has no value"), format!("write `--{name} VALUE`, or `--{name} true`"))
        })?;
        overrides.push(format!("{verb}.{}={value}", name.replace('-', "_")));
    }
    Ok((known, overrides))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        StageArgs::command().debug_assert();
    }

    #[test]
    fn further_options_are_parameters_of_the_stage() {
        let args = ["r.toml", "--limit", "3", "--image-column=picture", "--cache", "c", "--dump", "d"];
        let (known, overrides) = split_parameters("ingest", args.map(str::to_owned).to_vec()).ok().unwrap();
        assert_eq!(known, ["r.toml", "--cache", "c", "--dump", "d"]);
        assert_eq!(overrides, ["ingest.limit=3", "ingest.image_column=picture"]);
        assert!(split_parameters("ingest", vec!["--limit".to_owned()]).is_err());
    }
}
