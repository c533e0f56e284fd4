//! Opening datasets: ours and foreign ones, faulty ones, and a million rows without reading a page of them.

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{BooleanBuilder, Int64Builder, LargeListBuilder, ListBuilder};
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::Schema;
use common::{CHATML, fixture, load, target_dir};
use drafthorse_data::dataset::{Dataset, INDEX_FILE, OpenOptions, Row};
use drafthorse_data::index::{BatchPlace, ColumnType, DataFile, ElementType, Index, IndexHeader};
use drafthorse_data::prepare::{PrepareOptions, prepare};

type Rows = Vec<(Vec<i64>, Vec<bool>)>;

/// Writes a dataset as other programs do: large_list<int64> ids and list<bool> masks, no card, no index.
fn write_foreign(dir: &Path, shards: &[Rows]) {
    let names: Vec<String> = (0..shards.len()).map(|i| format!("data-{i:05}-of-{:05}.arrow", shards.len())).collect();
    for (name, rows) in names.iter().zip(shards) {
        let mut ids = LargeListBuilder::new(Int64Builder::new());
        let mut mask = ListBuilder::new(BooleanBuilder::new());
        for (i, m) in rows {
            ids.values().append_slice(i);
            ids.append(true);
            mask.values().append_slice(m);
            mask.append(true);
        }
        write_columns(&dir.join(name), vec![("input_ids", Arc::new(ids.finish())), ("loss_mask", Arc::new(mask.finish()))], 3);
    }
    write_state(dir, &names);
}

fn write_state(dir: &Path, names: &[String]) {
    let files: Vec<_> = names.iter().map(|n| serde_json::json!({"filename": n})).collect();
    fs::write(dir.join("state.json"), serde_json::json!({"_data_files": files}).to_string()).unwrap();
}

fn write_columns(path: &Path, columns: Vec<(&str, ArrayRef)>, per_batch: usize) {
    let fields: Vec<_> = columns.iter().map(|(n, a)| arrow_schema::Field::new(*n, a.data_type().clone(), true)).collect();
    let schema = Arc::new(Schema::new(fields));
    let mut writer = StreamWriter::try_new(fs::File::create(path).unwrap(), &schema).unwrap();
    let n = columns[0].1.len();
    for at in (0..n).step_by(per_batch) {
        let part: Vec<ArrayRef> = columns.iter().map(|(_, a)| a.slice(at, per_batch.min(n - at))).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(per_batch.min(n - at)));
        writer.write(&RecordBatch::try_new_with_options(schema.clone(), part, &options).unwrap()).unwrap();
    }
    writer.finish().unwrap();
}

fn open(dir: &Path) -> drafthorse_data::Result<Dataset> {
    Dataset::open(dir, &OpenOptions::default(), &|_, _| {})
}

fn foreign_rows(n: i64) -> Rows {
    (0..n).map(|r| ((0..=r % 7 + 2).map(|i| 10 * r + i).collect(), (0..=r % 7 + 2).map(|i| i > r % 3).collect())).collect()
}

#[test]
fn a_foreign_dataset_gets_its_index_once_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let shards = [foreign_rows(20), foreign_rows(7)];
    write_foreign(dir.path(), &shards);
    let data = open(dir.path()).unwrap();
    assert!(data.notices()[0].contains("index written to"), "{:?}", data.notices());
    let again = Dataset::open(dir.path(), &OpenOptions::default(), &|_, _| panic!("scanned again")).unwrap();
    assert!(again.notices().is_empty() && again.index() == data.index());
    let mut row = Row::default();
    for (r, (ids, mask)) in shards.iter().flatten().enumerate() {
        again.read_row(r, &mut row).unwrap();
        assert!(row.ids.iter().map(|&i| i64::from(i)).eq(ids.iter().copied()), "row {r}");
        assert!(row.mask.iter().map(|&m| m == 1).eq(mask.iter().copied()), "row {r}");
        assert_eq!(again.index().candidates[r] as usize, mask.windows(2).filter(|w| w[0] && w[1]).count());
    }
    assert!(again.read_row(27, &mut row).unwrap_err().to_string().contains("from 0 to 26"));
    assert_eq!(again.index().header.max_token_id, 197);
    again.check_vocab(198).unwrap();
    let error = again.check_vocab(197).unwrap_err().to_string();
    assert!(error.contains("row 19") && error.contains("token id 197"), "{error}");
    assert!(!again.check_tokenizer("any").unwrap());
}

#[test]
fn a_changed_foreign_dataset_is_indexed_again_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    write_foreign(dir.path(), &[foreign_rows(20)]);
    open(dir.path()).unwrap();
    write_foreign(dir.path(), &[foreign_rows(400)]);
    let data = open(dir.path()).unwrap();
    assert_eq!(data.len(), 400);
    assert!(data.notices()[0].contains("out of date"), "{:?}", data.notices());
}

#[test]
fn an_index_goes_into_the_cache_when_it_cannot_lie_beside_the_data() {
    let dir = tempfile::tempdir().unwrap();
    write_foreign(dir.path(), &[foreign_rows(20)]);
    // A folder in the index's way stands for a read-only file system, which root could write to.
    fs::create_dir_all(dir.path().join(INDEX_FILE).join("x")).unwrap();
    fs::remove_dir_all(dir.path().join(INDEX_FILE)).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let blocked = dir.path().join(INDEX_FILE).with_extension(format!("partial-{}", std::process::id()));
    fs::create_dir(&blocked).unwrap();
    let options = OpenOptions { cache_dir: Some(cache.path().join("deep")) };
    let data = Dataset::open(dir.path(), &options, &|_, _| {}).unwrap();
    assert!(data.notices()[0].contains("read-only: index written to"), "{:?}", data.notices());
    Dataset::open(dir.path(), &options, &|_, _| panic!("scanned again")).unwrap();
}

#[test]
fn faulty_datasets_are_refused_by_name() {
    let refused = |make: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path());
        open(dir.path()).unwrap_err().to_string()
    };
    let has = |text: String, words: &[&str]| assert!(words.iter().all(|w| text.contains(w)), "{text}");
    has(
        refused(&|d| write_foreign(d, &[vec![(vec![1, 2, 3], vec![true, true, false]), (vec![1, 2], vec![true])]])),
        &["row 1", "2 token ids but 1 mask"],
    );
    has(refused(&|d| write_foreign(d, &[vec![(vec![1, -5], vec![true, false])]])), &["row 0", "token 1"]);
    has(refused(&|d| write_foreign(d, &[vec![(vec![1, 2], vec![false, false])]])), &["0 everywhere"]);
    has(refused(&|d| write_foreign(d, &[vec![(vec![1, 2], vec![true, true])]])), &["1 everywhere"]);
    has(refused(&|_| {}), &["no state.json"]);
    has(refused(&|d| fs::write(d.join("dataset_dict.json"), "{}").unwrap()), &["several splits"]);
    let cut = |keep: fn(usize) -> usize| {
        move |d: &Path| {
            write_foreign(d, &[foreign_rows(50)]);
            let path = d.join("data-00000-of-00001.arrow");
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..keep(bytes.len())]).unwrap();
        }
    };
    has(refused(&cut(|n| n - 300)), &["data-00000-of-00001.arrow", "Arrow stream"]);
    has(refused(&cut(|_| 0)), &["data-00000-of-00001.arrow", "empty"]);
    let strings = |d: &Path| {
        let text: ArrayRef = Arc::new(arrow_array::StringArray::from(vec!["a", "b"]));
        write_columns(&d.join("data.arrow"), vec![("input_ids", text.clone()), ("loss_mask", text)], 10);
        write_state(d, &["data.arrow".into()]);
    };
    has(refused(&strings), &["input_ids", "Utf8", "int32 or int64"]);
    let no_mask = |d: &Path| {
        let text: ArrayRef = Arc::new(arrow_array::StringArray::from(vec!["a"]));
        write_columns(&d.join("data.arrow"), vec![("input_ids", text)], 10);
        write_state(d, &["data.arrow".into()]);
    };
    has(refused(&no_mask), &["no column `loss_mask`", "it has input_ids"]);
}

#[test]
fn our_own_dataset_notices_damage_and_foreign_tokenizers() {
    let target = target_dir(CHATML);
    let tokenizer = load(target.path());
    let parent = tempfile::tempdir().unwrap();
    let options = PrepareOptions::new(vec![fixture("short_answers_b16.jsonl")], parent.path().join("data"));
    prepare(&tokenizer, &options, &|_| {}).unwrap();
    let data = open(&options.out).unwrap();
    assert!(data.check_tokenizer(tokenizer.tokenizer_hash()).unwrap());
    let error = data.check_tokenizer("0123456789abcdef").unwrap_err().to_string();
    assert!(error.contains("test/target") && error.contains("0123456789ab"), "{error}");

    let index = options.out.join(INDEX_FILE);
    let good = fs::read(&index).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    fs::write(&index, &bad).unwrap();
    assert!(open(&options.out).unwrap_err().to_string().contains("checksum"));
    fs::write(&index, &good).unwrap();
    let path = options.out.join("data-00000-of-00001.arrow");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 8]).unwrap();
    let error = open(&options.out).unwrap_err().to_string();
    assert!(error.contains("were indexed") && error.contains("data-00000"), "{error}");
    // Same length, other content: found when a row is read.
    fs::write(&path, vec![0x5a; bytes.len()]).unwrap();
    let error = open(&options.out).unwrap().read_row(0, &mut Row::default()).unwrap_err().to_string();
    assert!(error.contains("no longer holds what was indexed"), "{error}");
}

#[test]
fn a_million_rows_open_without_mapping_a_data_file() {
    const ROWS: usize = 1_000_000;
    let dir = tempfile::tempdir().unwrap();
    let name = "data-00000-of-00001.arrow".to_owned();
    // A sparse file of the right length: a reader that looked inside would find no Arrow stream.
    fs::File::create(dir.path().join(&name)).unwrap().set_len(5 << 30).unwrap();
    write_state(dir.path(), std::slice::from_ref(&name));
    let column = |element| ColumnType { element, large: false };
    let batches: Vec<BatchPlace> = (0..ROWS as u64 / 1000)
        .map(|b| BatchPlace {
            file: 0,
            first_row: 1000 * b,
            rows: 1000,
            ids_offsets: 8,
            ids_values: 8,
            mask_offsets: 8,
            mask_values: 8,
            mask_bit: 0,
        })
        .collect();
    let header = IndexHeader {
        fingerprint: "f".repeat(64),
        files: vec![DataFile { name, bytes: 5 << 30 }],
        rows: ROWS as u64,
        tokens: 1000 * ROWS as u64,
        supervised: 600 * ROWS as u64,
        candidates: 599 * ROWS as u64,
        max_token_id: 9,
        max_token_row: 0,
        unused_ids: vec![],
        ids: column(ElementType::Int32),
        mask: column(ElementType::Int8),
        batches: batches.len() as u64,
    };
    let index = Index { header, batches, lengths: vec![1000; ROWS], supervised: vec![600; ROWS], candidates: vec![599; ROWS] };
    index.write(&dir.path().join(INDEX_FILE)).unwrap();
    let begin = std::time::Instant::now();
    let data = Dataset::open(dir.path(), &OpenOptions::default(), &|_, _| panic!("scanned")).unwrap();
    eprintln!("opened {} rows in {:.3} s", data.len(), begin.elapsed().as_secs_f64());
    assert_eq!((data.len(), data.mapped_files()), (ROWS, 0));
    assert!(data.read_row(5, &mut Row::default()).is_err(), "the file holds no rows");
    assert_eq!(data.mapped_files(), 1);
}
