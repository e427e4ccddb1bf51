"""The one list of what the trial leaves out of the unit tests, as Wine lacks what they need; each with the reason."""

LINKS = "Wine says that it made a link, and makes none"
PARENT = "the process that starts Python is none of Windows, so that its number is 0"
LEFT_OUT = {
    "unit/common/test_access.py::test_a_link_counts_as_the_place_that_it_leads_to": LINKS,
    "unit/common/test_access.py::test_a_folder_behind_a_link_has_both_names": LINKS,
    "unit/common/test_leftovers.py::test_a_later_process_of_the_same_number_does_not_keep_a_file": PARENT,
    "unit/common/test_leftovers.py::test_files_of_a_process_that_ended_go_and_those_of_one_that_runs_stay": PARENT,
    "unit/data/scan/test_own_file.py::test_a_file_that_a_link_takes_from_elsewhere_is_not_read": LINKS,
    "unit/data/scan/test_scan.py::test_links_in_circles_end": LINKS,
    "unit/preflight/test_shown_pictures.py::test_a_link_to_a_text_elsewhere_is_not_read": LINKS,
    "unit/runs/test_catalogue.py::test_clean_leaves_what_is_at_work_what_may_be_needed_and_what_lies_elsewhere": LINKS,
    "unit/runs/test_export.py::test_a_run_that_is_a_link_is_listed_and_not_read": LINKS,
    "unit/runs/test_export.py::test_no_file_of_a_save_and_no_save_may_be_a_link": LINKS,
    "unit/runs/test_export.py::test_no_part_of_a_run_may_be_a_link_to_another_place": LINKS,
    "unit/workflow/test_places.py::test_a_link_is_followed": LINKS,
}
